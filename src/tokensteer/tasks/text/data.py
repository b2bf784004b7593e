"""Movie reviews as windows of tokens, with what each reviewer thought of the film.

    python -m tokensteer.tasks.text.data --reviews REVIEWS.csv --vocab vocab.txt --out FOLDER

makes the one file that training reads. The CSV has columns `text` and `label` (1 for praise, 0 for blame), as IMDB and
Rotten Tomatoes come; vocab.txt is BERT's. A vocabulary of fewer pieces is chosen: the most frequent in the reviews and
all single characters, so that any word can still be spelt.

A window is `length` tokens from the beginning of a sentence on. Reviews shorter than that are laid end to end with
others of the same label. Reviews that follow one another are often about the same film, so blocks of them are dealt out
to three parts: one nothing learns from, and one for each of the two classifiers, which share no review.
"""

from __future__ import annotations

import argparse
import csv
import html
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tokensteer.tasks.common import arrays as arrays_in
from tokensteer.tasks.common.task import data_folder
from tokensteer.tasks.common.training import say
from tokensteer.tasks.text.wordpiece import INNER, MASK, WordPiece, lines, words

FILE = "reviews-ids.npz"
LENGTH = 64
SIZE = 8000
PARTS = ("test", "reward", "judge")
SHARES = (0.08, 0.46, 0.46)
BLOCK = 50
"""Reviews that are dealt out together."""
COMMON = 0.2
"""The least share of a review's words among the hundred most frequent of all: other languages have fewer."""
BREAK = 2**16 - 1
"""In place of a word that cannot be spelt, and between reviews: no window holds it."""

_SENTENCE = re.compile(r"(?<!\bMr|\bMs|\bDr|\bSt|\bJr|\bvs)(?<!\bMrs)(?<!\b[A-Z])[.!?][\"')\]]*\s+(?=[\"'(]?[A-Z0-9])")


@dataclass(frozen=True)
class Windows:
    """ids (D, L) of type int16, labels (D,)."""

    ids: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Reviews:
    """The windows of each part, and the vocabulary they are written in."""

    vocabulary: WordPiece
    parts: dict[str, Windows]

    @property
    def training(self) -> Windows:
        """All that a denoiser may learn from."""
        both = [self.parts[name] for name in PARTS[1:]]
        return Windows(torch.cat([part.ids for part in both]), torch.cat([part.labels for part in both]))


def load(file: Path | None = None, length: int = LENGTH) -> Reviews:
    """The windows of a file that `prepare` made."""
    file = data_folder() / FILE if file is None else file
    if not file.is_file():
        raise FileNotFoundError(
            f"there is no {file}: set TOKENSTEER_DATA to the folder that holds {FILE}, or make it by "
            "python -m tokensteer.tasks.text.data --reviews REVIEWS.csv --vocab vocab.txt --out FOLDER"
        )
    names = ("pieces", "origin", "stream", "starts", "labels", "parts")
    arrays = arrays_in.read(file, names, "make it again by python -m tokensteer.tasks.text.data")
    pieces: list[str] = arrays["pieces"].tolist()
    origin: list[int] = arrays["origin"].tolist()
    stream, starts, labels, parts = (arrays[name] for name in ("stream", "starts", "labels", "parts"))
    whole = starts + length <= len(stream)
    starts, labels, parts = starts[whole], labels[whole], parts[whole]
    rows = np.lib.stride_tricks.sliding_window_view(stream, length)[starts]
    unbroken = (rows != BREAK).all(-1)
    found: dict[str, Windows] = {}
    for k, name in enumerate(PARTS):
        here = unbroken & (parts == k)
        ids = torch.from_numpy(rows[here].astype(np.int16))  # pyright: ignore[reportUnknownMemberType]
        found[name] = Windows(ids, torch.from_numpy(labels[here].astype(np.int64)))  # pyright: ignore[reportUnknownMemberType]
    return Reviews(WordPiece(tuple(pieces), tuple(origin)), found)


def prepare(reviews: Path, vocab: Path, out: Path, size: int = SIZE, length: int = LENGTH, seed: int = 0) -> Path:
    """Make the file that `load` reads."""
    for file in (reviews, vocab):
        if not file.is_file():
            raise FileNotFoundError(f"there is no file {file}")
    texts, labels = _read(reviews)
    full = WordPiece.of(lines(vocab))
    spoken = [[words(sentence) for sentence in sentences(text)] for text in texts]
    counts = Counter(word for review in spoken for sentence in review for word in sentence)
    common = {word for word, _ in counts.most_common(100)}
    english = [_share(review, common) >= COMMON for review in spoken]
    vocabulary = restricted(full, counts, size)
    parts = deal(len(texts), np.random.default_rng(seed))
    stream: list[int] = [BREAK]
    starts: list[tuple[int, int, int]] = []  # where a window may start, its label, its part
    short: dict[tuple[int, int], list[list[int]]] = {}
    for review, label, part, kept in zip(spoken, labels, parts, english, strict=True):
        if not kept:
            continue
        spelt = [_ids(vocabulary, sentence) for sentence in review]
        if sum(map(len, spelt)) < length:
            short.setdefault((label, part), []).append([k for sentence in spelt for k in sentence])
        else:
            _lay(spelt, label, part, stream, starts)
    for (label, part), pieces in sorted(short.items()):
        _lay(pieces, label, part, stream, starts)
    file = out / FILE
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


def _read(file: Path) -> tuple[list[str], list[int]]:
    csv.field_size_limit(sys.maxsize)
    with file.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    if not rows or not {"text", "label"} <= rows[0].keys() or not all(row["label"] in ("0", "1") for row in rows):
        raise ValueError(f"{file} must have the columns text and label, and each label must be 0 or 1")
    return [row["text"] for row in rows], [int(row["label"]) for row in rows]


def sentences(text: str) -> list[str]:
    """A review without its HTML, parted where a sentence ends and a capital letter begins the next."""
    plain = re.sub(r"<[^>]*>", " ", html.unescape(text))
    ends = [match.end() for match in _SENTENCE.finditer(plain)]
    parted = [plain[a:b].strip() for a, b in zip([0, *ends], [*ends, len(plain)], strict=True)]
    return [sentence for sentence in parted if sentence]


def restricted(full: WordPiece, counts: Counter[str], size: int) -> WordPiece:
    """The mask, all single characters of plain English and the pieces that words with these counts use most."""
    used: Counter[int] = Counter()
    for word, count in counts.items():
        for piece in full.spell(word) or ():
            used[piece] += count
    letters = [chr(c) for c in range(ord("!"), ord("~") + 1) if not chr(c).isupper()]
    single = [inner + c for c in letters for inner in ("", INNER) if inner + c in full.ids]
    likely = [full.pieces[piece] for piece, _ in used.most_common()]
    chosen = list(dict.fromkeys([MASK, *single, *likely]))[:size]
    origin = sorted(full.ids[piece] for piece in chosen)
    return WordPiece(tuple(full.pieces[k] for k in origin), tuple(origin))


def deal(count: int, random: np.random.Generator) -> list[int]:
    """The part that each of `count` reviews belongs to, block by block."""
    blocks = -(-count // BLOCK)
    borders = np.cumsum(SHARES)[:-1] * blocks
    part_of_place = np.searchsorted(borders, np.arange(blocks), side="right")
    part_of_block = random.permutation(part_of_place)
    return [int(part_of_block[k // BLOCK]) for k in range(count)]


def _share(review: Sequence[Sequence[str]], common: set[str]) -> float:
    spoken = [word for sentence in review for word in sentence]
    return sum(word in common for word in spoken) / max(1, len(spoken))


def _ids(vocabulary: WordPiece, sentence: Iterable[str]) -> list[int]:
    return [k for word in sentence for k in vocabulary.spell(word) or (BREAK,)]


def _lay(
    sentences: Sequence[Sequence[int]], label: int, part: int, stream: list[int], starts: list[tuple[int, int, int]]
) -> None:
    """Append sentences of ids to the stream, with a break behind them."""
    for sentence in sentences:
        starts.append((len(stream), label, part))
        stream += sentence
    stream.append(BREAK)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    words_ = argparse.ArgumentParser(
        prog="python -m tokensteer.tasks.text.data", description=f"Make {FILE} from reviews and BERT's vocabulary."
    )
    words_.add_argument("--reviews", type=Path, required=True, help="CSV with the columns text and label")
    words_.add_argument("--vocab", type=Path, required=True, help="BERT's vocab.txt (uncased)")
    words_.add_argument("--out", type=Path, default=None, help="folder for the file, TOKENSTEER_DATA if not given")
    words_.add_argument("--size", type=int, default=SIZE, help="pieces of the vocabulary that is chosen")
    given = words_.parse_args(arguments)
    try:
        prepare(given.reviews, given.vocab, data_folder() if given.out is None else given.out, given.size)
    except (FileNotFoundError, ValueError) as error:
        say(f"text_data: {error}")
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
