"""Pack what the larger prior of texts is made from into files of 20 MB, for a GPU machine that takes small files only.

    python -m tokensteer.tasks.text --part published --out PUBLISHED   # MiniLM and the classifier of toxicity
    python tools/pack_text.py pack PUBLISHED PIECES                    # needs TOKENSTEER_DATA
    python tools/pack_text.py unpack PIECES FOLDER                     # on the other machine: plain Python

Packed are both published networks, SmolLM2's GGUF file, the reviews and BERT's vocabulary. FOLDER is TOKENSTEER_DATA on
the other machine.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import tarfile
from pathlib import Path

BYTES = 20_000_000
NAME = "text-data"
PACKED = ".gz"


def pack(published: Path, out: Path) -> list[Path]:
    from tokensteer.tasks.text.fluency import PATTERN
    from tokensteer.tasks.text.prior.parts import REVIEWS, VOCAB
    from tokensteer.tasks.text.prior.published import MINILM, TOXICITY, find

    files = [published / MINILM, published / TOXICITY, find(PATTERN), find(REVIEWS), find(VOCAB)]
    return split({file.name: file.read_bytes() for file in files}, out)


def split(contents: dict[str, bytes], out: Path, size: int = BYTES, called: str = NAME) -> list[Path]:
    """Write files by name as pieces of one archive, texts compressed, and its hash."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in contents.items():
            plain = name.endswith((".csv", ".txt"))
            stored = gzip.compress(content, mtime=0) if plain else content
            entry = tarfile.TarInfo(name + PACKED if plain else name)
            entry.size = len(stored)
            archive.addfile(entry, io.BytesIO(stored))
    data = buffer.getvalue()
    out.mkdir(parents=True, exist_ok=True)
    pieces: list[Path] = []
    for start in range(0, len(data), size):
        pieces.append(out / f"{called}.part{start // size:02d}")
        pieces[-1].write_bytes(data[start : start + size])
    (out / f"{called}.sha256").write_text(hashlib.sha256(data).hexdigest() + "\n")
    return pieces


def unpack(pieces: Path, folder: Path, called: str = NAME) -> list[str]:
    """Write the files of all pieces to a folder; returns their names."""
    data = b"".join(piece.read_bytes() for piece in sorted(pieces.glob(f"{called}.part*")))
    if hashlib.sha256(data).hexdigest() != (pieces / f"{called}.sha256").read_text().strip():
        raise ValueError(f"{pieces} does not hold all pieces as they were packed: copy them again")
    folder.mkdir(parents=True, exist_ok=True)
    names: list[str] = []
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for entry in archive.getmembers():
            stored = archive.extractfile(entry)
            assert stored is not None
            content = stored.read()
            name = Path(entry.name).name
            content = gzip.decompress(content) if name.endswith(PACKED) else content
            names.append(name.removesuffix(PACKED))
            (folder / names[-1]).write_bytes(content)
    return names


def main() -> None:
    match sys.argv[1:]:
        case ["pack", published, out]:
            pack(Path(published), Path(out))
        case ["unpack", pieces, folder]:
            unpack(Path(pieces), Path(folder))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
