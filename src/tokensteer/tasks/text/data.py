"""Movie reviews as windows of tokens, with labels for praise and blame.

    python -m tokensteer.tasks.text.data --reviews REVIEWS.csv --vocab vocab.txt --out FOLDER

makes the file that training reads. The CSV has columns `text` and `label` (1 for praise, 0 for blame), as in IMDB and
Rotten Tomatoes; vocab.txt is BERT's. The vocabulary is restricted to the pieces that are most frequent in the reviews
and all single characters, so that any word can still be spelt.

A window is `length` tokens from the beginning of a sentence. Shorter reviews are concatenated with others of the same
label. Neighbouring reviews are often about the same film, so reviews are split by blocks into three parts: test data,
and one part for each of the two classifiers. The denoiser is trained on the last two.
"""

from __future__ import annotations

import csv
import html
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tokensteer.tasks.common import arrays as arrays_in
from tokensteer.tasks.common.arrays import Examples
from tokensteer.tasks.common.command import run_command
from tokensteer.tasks.common.task import data_file, data_folder
from tokensteer.tasks.common.training import say
from tokensteer.tasks.common.wordpiece import INNER, MASK, WordPiece, lines, words

FILE = "reviews-ids.npz"
LENGTH = 64
SIZE = 8000
PARTS = ("test", "reward", "judge")
SHARES = (0.08, 0.46, 0.46)
BLOCK = 50  # neighbouring reviews that are in the same part
COMMON = 0.2  # the least share of a review's words among the hundred most frequent: other languages have fewer
BREAK = 2**16 - 1  # stands for a word that cannot be spelt, and between reviews: no window contains it

_SENTENCE = re.compile(r"(?<!\bMr|\bMs|\bDr|\bSt|\bJr|\bvs)(?<!\bMrs)(?<!\b[A-Z])[.!?][\"')\]]*\s+(?=[\"'(]?[A-Z0-9])")


@dataclass(frozen=True)
class Reviews:
    """The windows of each part, and their vocabulary."""

    vocabulary: WordPiece
    parts: dict[str, Examples]

    @property
    def training(self) -> Examples:
        """The training data of the denoiser."""
        return Examples.joined(self.parts[name] for name in PARTS[1:])


def load(file: Path | None = None, length: int = LENGTH) -> Reviews:
    """The windows of a file that `prepare` made."""
    options = "--reviews REVIEWS.csv --vocab vocab.txt --out FOLDER"
    file = data_file(FILE, f", or make it by python -m tokensteer.tasks.text.data {options}") if file is None else file
    names = ("pieces", "origin", "stream", "starts", "labels", "parts")
    arrays = arrays_in.read(file, names, "make it again by python -m tokensteer.tasks.text.data")
    pieces: list[str] = arrays["pieces"].tolist()
    origin: list[int] = arrays["origin"].tolist()
    stream, starts, labels, parts = (arrays[name] for name in ("stream", "starts", "labels", "parts"))
    whole = starts + length <= len(stream)
    starts, labels, parts = starts[whole], labels[whole], parts[whole]
    rows = np.lib.stride_tricks.sliding_window_view(stream, length)[starts]
    unbroken = (rows != BREAK).all(-1)
    windows = Examples(torch.as_tensor(rows.astype(np.int16)), torch.as_tensor(labels.astype(np.int64)))
    found = {name: windows.take(torch.as_tensor(unbroken & (parts == k))) for k, name in enumerate(PARTS)}
    return Reviews(WordPiece(tuple(pieces), tuple(origin)), found)


def prepare(
    reviews: Path, vocab: Path, out: Path | None = None, size: int = SIZE, length: int = LENGTH, seed: int = 0
) -> Path:
    """Make the file that `load` reads from reviews and BERT's vocabulary.

    Args:
        reviews: CSV with the columns text and label
        vocab: BERT's vocab.txt (uncased)
        out: folder for the file, TOKENSTEER_DATA if not given
        size: pieces of the restricted vocabulary
        length: reviews of fewer tokens are concatenated
        seed: of the split into parts
    """
    for file in (reviews, vocab):
        if not file.is_file():
            raise FileNotFoundError(f"there is no file {file}")
    texts, labels = read_reviews(reviews)
    full = WordPiece.of(lines(vocab))
    spoken = [[words(sentence) for sentence in sentences(text)] for text in texts]
    flat = [[word for sentence in review for word in sentence] for review in spoken]
    counts = Counter(word for review in flat for word in review)
    common = {word for word, _ in counts.most_common(100)}
    english = [sum(word in common for word in review) / max(1, len(review)) >= COMMON for review in flat]
    vocabulary = restricted(full, counts, size)
    parts = deal(len(texts), np.random.default_rng(seed))
    stream: list[int] = [BREAK]
    starts: list[tuple[int, int, int]] = []  # where a window may start, its label, its part
    short: dict[tuple[int, int], list[list[int]]] = {}
    for review, label, part, kept in zip(spoken, labels, parts, english, strict=True):
        if not kept:
            continue
        spelt = [[k for word in sentence for k in vocabulary.spell(word) or (BREAK,)] for sentence in review]
        if sum(map(len, spelt)) < length:
            short.setdefault((label, part), []).append([k for sentence in spelt for k in sentence])
        else:
            _lay(spelt, label, part, stream, starts)
    for (label, part), pieces in sorted(short.items()):
        _lay(pieces, label, part, stream, starts)
    file = (data_folder() if out is None else out) / FILE
    where, which, whose = zip(*starts, strict=True)
    arrays_in.write(
        file,
        pieces=np.array(vocabulary.pieces),
        origin=np.array(vocabulary.origin, np.int32),
        stream=np.array(stream, np.uint16),
        starts=np.array(where, np.int32),
        labels=np.array(which, np.uint8),
        parts=np.array(whose, np.uint8),
    )
    say(f"{file}: {len(stream):,} tokens of {sum(english):,} reviews; {len(texts) - sum(english):,} left out")
    return file


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


def _lay(
    sentences: Sequence[Sequence[int]], label: int, part: int, stream: list[int], starts: list[tuple[int, int, int]]
) -> None:
    """Append sentences of ids to the stream, and a break."""
    for sentence in sentences:
        starts.append((len(stream), label, part))
        stream += sentence
    stream.append(BREAK)


def main(arguments: Sequence[str] | None = None) -> None:
    run_command("text.data", prepare, arguments)


if __name__ == "__main__":
    main()
