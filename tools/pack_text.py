"""Pack what the larger prior of texts is made from into files of 20 MB, for a GPU machine that takes small files only.

    python -m tokensteer.tasks.text --part published --out PUBLISHED   # MiniLM and the classifier of toxicity
    python tools/pack_text.py pack PUBLISHED PIECES                    # needs TOKENSTEER_DATA
    python tools/pack_text.py unpack PIECES FOLDER                     # on the other machine: plain Python

Packed are both published networks, SmolLM2's GGUF file, the reviews and BERT's vocabulary. FOLDER is TOKENSTEER_DATA on
the other machine.
"""

from __future__ import annotations

from pathlib import Path

from pieces import archive, cut, extract, join, run

BYTES = 20_000_000
NAME = "text-data"


def pack(published: Path, out: Path) -> list[Path]:
    from tokensteer.tasks.text.fluency import PATTERN
    from tokensteer.tasks.text.prior.parts import REVIEWS, VOCAB
    from tokensteer.tasks.text.prior.published import MINILM, TOXICITY, find

    files = [published / MINILM, published / TOXICITY, find(PATTERN), find(REVIEWS), find(VOCAB)]
    return cut(archive({file.name: file.read_bytes() for file in files}), out, NAME, BYTES)


def unpack(pieces: Path, folder: Path) -> list[str]:
    return extract(join(pieces, NAME), folder)


if __name__ == "__main__":
    run(__doc__, pack=pack, unpack=unpack)
