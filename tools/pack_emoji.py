"""Pack what the task `emoji` is trained from into files of 15 MB, for a GPU machine that takes small files only.

    python -m tokensteer.tasks.emoji --part data --out FOLDER        # drawings and the encoder of captions
    python -m tokensteer.tasks.cifar --part lpips --out FOLDER       # LPIPS, which the tokeniser is trained with
    python tools/pack_emoji.py pack FOLDER PIECES
    python tools/pack_emoji.py unpack PIECES FOLDER                  # on the other machine: plain Python

FOLDER is TOKENSTEER_DATA on the other machine. The states of captions are computed there.
"""

from __future__ import annotations

from pathlib import Path

from pieces import archive, cut, extract, join, run

NAME, BYTES = "emoji-data", 15_000_000
FILES = ("emoji.npz", "emoji-encoder.safetensors", "emoji-vocab.txt", "lpips-vgg16.safetensors")


def pack(folder: Path, out: Path) -> list[Path]:
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}: make them as the help of this tool says")
    return cut(archive({name: (folder / name).read_bytes() for name in FILES}), out, NAME, BYTES)


def unpack(pieces: Path, folder: Path) -> list[str]:
    return extract(join(pieces, NAME), folder)


if __name__ == "__main__":
    run(__doc__, pack=pack, unpack=unpack)
