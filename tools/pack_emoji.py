"""Pack what the task `emoji` is trained from into files of 15 MB, for a GPU machine that takes small files only.

    python -m tokensteer.tasks.emoji --part data --out FOLDER        # drawings and the encoder of captions
    python -m tokensteer.tasks.cifar --part lpips --out FOLDER       # LPIPS, which the tokeniser is trained with
    python tools/pack_emoji.py pack FOLDER PIECES
    python tools/pack_emoji.py unpack PIECES FOLDER                  # on the other machine: plain Python

FOLDER is TOKENSTEER_DATA on the other machine. The states of captions are computed there.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

NAME, BYTES = "emoji-data", 15_000_000
FILES = ("emoji.npz", "emoji-encoder.safetensors", "emoji-vocab.txt", "lpips-vgg16.safetensors")
_SHARED = runpy.run_path(str(Path(__file__).with_name("pack_text.py")))  # tools are no package


def pack(folder: Path, out: Path) -> list[Path]:
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}: make them as the help of this tool says")
    return _SHARED["split"]({name: (folder / name).read_bytes() for name in FILES}, out, BYTES, NAME)


def unpack(pieces: Path, folder: Path) -> list[str]:
    return _SHARED["unpack"](pieces, folder, NAME)


def main() -> None:
    match sys.argv[1:]:
        case ["pack", folder, out]:
            pack(Path(folder), Path(out))
        case ["unpack", pieces, folder]:
            unpack(Path(pieces), Path(folder))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
