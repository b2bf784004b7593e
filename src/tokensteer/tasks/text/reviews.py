"""Real reviews as sentences, the vocabulary of all texts, and the parts that reviews are dealt to.

Neighbouring reviews are often about the same film, so they are dealt by blocks to three parts: test data, and one part
for each of the two classifiers of sentiment.
"""

from __future__ import annotations

import csv
import html
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tokensteer.tasks.common.wordpiece import INNER, MASK, WordPiece

PARTS = ("test", "reward", "judge")
SHARES = (0.08, 0.46, 0.46)
BLOCK = 50  # neighbouring reviews that are in the same part
COMMON = 0.2  # the least share of a review's words among the hundred most frequent: other languages have fewer

_SENTENCE = re.compile(r"(?<!\bMr|\bMs|\bDr|\bSt|\bJr|\bvs)(?<!\bMrs)(?<!\b[A-Z])[.!?][\"')\]]*\s+(?=[\"'(]?[A-Z0-9])")


def read_reviews(file: Path) -> tuple[list[str], list[int]]:
    """The texts of a CSV and their labels, 1 for praise and 0 for blame."""
    csv.field_size_limit(sys.maxsize)
    with file.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    if not rows or not {"text", "label"} <= rows[0].keys() or not all(row["label"] in ("0", "1") for row in rows):
        raise ValueError(f"{file} must have the columns text and label, and each label must be 0 or 1")
    return [row["text"] for row in rows], [int(row["label"]) for row in rows]


def sentences(text: str) -> list[str]:
    """The sentences of a review without its HTML; each begins with a capital letter or a digit."""
    plain = re.sub(r"<[^>]*>", " ", html.unescape(text))
    ends = [match.end() for match in _SENTENCE.finditer(plain)]
    parted = [plain[a:b].strip() for a, b in zip([0, *ends], [*ends, len(plain)], strict=True)]
    return [sentence for sentence in parted if sentence]


def restricted(full: WordPiece, counts: Counter[str], size: int, needed: Sequence[str] = ()) -> WordPiece:
    """The vocabulary of the mask, all single ASCII characters, the pieces `needed` in any case, and those most used by
    words with these counts."""
    used: Counter[int] = Counter()
    for word, count in counts.items():
        for piece in full.spell(word) or ():
            used[piece] += count
    letters = [chr(c) for c in range(ord("!"), ord("~") + 1) if not chr(c).isupper()]
    single = [inner + c for c in letters for inner in ("", INNER) if inner + c in full.ids]
    likely = [full.pieces[piece] for piece, _ in used.most_common()]
    chosen = list(dict.fromkeys([MASK, *single, *needed, *likely]))[:size]
    origin = sorted(full.ids[piece] for piece in chosen)
    return WordPiece(tuple(full.pieces[k] for k in origin), tuple(origin))


def deal(count: int, random: np.random.Generator) -> list[int]:
    """The part of each of `count` reviews, by blocks."""
    blocks = -(-count // BLOCK)
    borders = np.cumsum(SHARES)[:-1] * blocks
    part_of_place = np.searchsorted(borders, np.arange(blocks), side="right")
    part_of_block = random.permutation(part_of_place)
    return [int(part_of_block[k // BLOCK]) for k in range(count)]
