"""Texts of the corpus and real reviews as windows of tokens: the data that the prior is trained on.

The vocabulary is restricted to the pieces that are most frequent in both, all single characters, and pieces that a
classifier of toxicity needs. A text of the corpus gives one window, its beginning; a real review gives a few, each from
the beginning of a sentence. Texts of fewer tokens than a window are left out.

Texts are dealt to three parts: test data, and one part for each of the two classifiers of sentiment. The denoiser is
trained on the last two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokensteer.tasks.common import arrays as arrays_in
from tokensteer.tasks.common.training import say
from tokensteer.tasks.common.wordpiece import WordPiece, lines, words
from tokensteer.tasks.text.corpus.write import read_corpus
from tokensteer.tasks.text.reviews import COMMON, PARTS, deal, read_reviews, restricted, sentences

FILE = "prior-ids.npz"
LENGTH = 100
SIZE = 8000
SHARES = (0.03, 0.485, 0.485)  # of the corpus, for `PARTS`
SPREAD = 4  # windows of a real review at most
_ARRAYS = ("pieces", "origin", "ids", "labels", "parts", "real")
_CHUNK = 500  # reviews that a process splits at a time


Windows = arrays_in.Examples
"""Labels are moods of the corpus, or 1 and 0 for praise and blame of reviews."""


@dataclass(frozen=True)
class Corpus:
    """The windows of each part of `PARTS`, of texts that the model wrote and of real reviews."""

    vocabulary: WordPiece
    taught: dict[str, Windows]
    real: dict[str, Windows]

    @property
    def length(self) -> int:
        return self.taught[PARTS[0]].ids.shape[1]


def load(file: Path) -> Corpus:
    """The windows of a file that `prepare` made."""
    mend = "make it by python -m tokensteer.tasks.text --part windows"
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}: {mend}")
    stored = arrays_in.read(file, _ARRAYS, mend)
    vocabulary = WordPiece(tuple(stored["pieces"].tolist()), tuple(stored["origin"].tolist()))
    whole = Windows(torch.as_tensor(stored["ids"].astype(np.int16)), torch.as_tensor(stored["labels"].astype(np.int64)))
    found: list[dict[str, Windows]] = []
    for real in (0, 1):
        chosen = [(stored["real"] == real) & (stored["parts"] == place) for place in range(len(PARTS))]
        found.append({name: whole.take(torch.as_tensor(some)) for name, some in zip(PARTS, chosen, strict=True)})
    return Corpus(vocabulary, *found)


def prepare(
    texts: Path,
    reviews: Path,
    vocab: Path,
    file: Path,
    needed: Sequence[int] = (),
    size: int = SIZE,
    length: int = LENGTH,
    workers: int = 0,
    seed: int = 0,
) -> Corpus:
    """Make the file that `load` reads: from a corpus that `write_corpus` wrote, a CSV of reviews, and BERT's
    vocabulary, of which the pieces `needed` are kept in any case."""
    if not vocab.is_file():
        raise FileNotFoundError(f"there is no vocabulary {vocab}: give BERT's vocab.txt (uncased)")
    full, random = WordPiece.of(lines(vocab)), np.random.default_rng(seed)
    moods, written = read_corpus(texts)
    plain, marks = read_reviews(reviews)
    said = _split_all(plain, workers)
    counts = Counter(word for text in written for word in text)
    counts.update(word for review in said for sentence in review for word in sentence)
    vocabulary = restricted(full, counts, size, [full.pieces[k] for k in needed])
    taught_part = random.choice(len(PARTS), len(written), p=SHARES).tolist()
    review_part = deal(len(said), random)
    common = {word for word, _ in counts.most_common(100)}
    rows: list[tuple[list[int], int, int, int]] = []
    for text, mood, part in zip(written, moods, taught_part, strict=True):
        window = spelt(text, vocabulary, length)
        if window is not None:
            rows.append((window, mood, part, 0))
    for review, mark, part in zip(said, marks, review_part, strict=True):
        rows += [(window, mark, part, 1) for window in _of_review(review, vocabulary, length, common)]
    if not rows:
        raise ValueError(f"no text of {texts} has {length} tokens: write longer ones")
    ids, labels, parts, real = zip(*rows, strict=True)
    arrays: dict[str, Any] = {
        "pieces": np.array(vocabulary.pieces),
        "origin": np.array(vocabulary.origin, np.int32),
        "ids": np.array(ids, np.uint16),
        "labels": np.array(labels, np.uint8),
        "parts": np.array(parts, np.uint8),
        "real": np.array(real, np.uint8),
    }
    arrays_in.write(file, **arrays)
    found = load(file)
    say(f"{file}: {sum(map(len, found.taught.values())):,} windows of {len(written):,} texts of the corpus, and")
    say(f"  {sum(map(len, found.real.values())):,} of {len(plain):,} real reviews, in {len(vocabulary):,} pieces")
    return found


def spelt(text: Sequence[str], vocabulary: WordPiece, length: int) -> list[int] | None:
    """The first `length` tokens of words; None if there are fewer, or a word cannot be spelt."""
    found: list[int] = []
    for word in text:
        pieces = vocabulary.spell(word)
        if pieces is None:
            return None
        found += pieces
        if len(found) >= length:
            return found[:length]
    return None


def _of_review(
    review: Sequence[Sequence[str]], vocabulary: WordPiece, length: int, common: set[str]
) -> list[list[int]]:
    """Windows from the beginnings of sentences, spread over the review; none of a review in another language."""
    flat = [word for sentence in review for word in sentence]
    if sum(word in common for word in flat) < COMMON * len(flat):
        return []
    starts = np.cumsum([0, *map(len, review[:-1])])
    long = starts[starts + length <= len(flat)]  # a word has one piece at least
    few = long[np.linspace(0, len(long) - 1, min(SPREAD, len(long))).round().astype(int)]
    found = (spelt(flat[start:], vocabulary, length) for start in few.tolist())
    return [window for window in found if window is not None]


def _split_all(texts: Sequence[str], workers: int) -> list[list[list[str]]]:
    """The words of the sentences of each text, in `workers` processes, or in this one."""
    parts = [texts[k : k + _CHUNK] for k in range(0, len(texts), _CHUNK)]
    if not workers:
        return [review for part in parts for review in split(part)]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        return [review for part in pool.map(split, parts) for review in part]


def split(texts: Sequence[str]) -> list[list[list[str]]]:
    """The words of the sentences of each text."""
    return [[words(sentence) for sentence in sentences(text)] for text in texts]


def sampler(corpus: Corpus, real_share: float, device: torch.device | str) -> Callable[[int, torch.Generator], Tensor]:
    """Draws ids (rows, L) of the two training parts, a share `real_share` of them from real reviews, if there are
    any."""
    pools = [
        Windows.joined(source[name] for name in PARTS[1:]).ids.to(device) for source in (corpus.taught, corpus.real)
    ]
    share = real_share if len(pools[1]) else 0.0

    def draw(rows: int, generator: torch.Generator) -> Tensor:
        real = round(rows * share)
        chosen = zip(pools, (rows - real, real), strict=True)
        picked = [pool[torch.randint(len(pool), (n,), generator=generator, device=device)] for pool, n in chosen if n]
        return torch.cat(picked).long()

    return draw
