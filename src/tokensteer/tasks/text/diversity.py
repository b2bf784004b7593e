"""The diversity of texts by their words: distinct n-grams and self-BLEU."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from tokensteer.tasks.common.wordpiece import words

LONGEST = 4
UNSEEN = 0.1  # the count of shared n-grams in place of 0, so that texts without shared 4-grams still differ in BLEU


def ngrams(text: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(text[k : k + n]) for k in range(len(text) - n + 1)]


def distinct(texts: Sequence[str], n: int) -> float:
    """The share of distinct n-grams among those of all texts, NaN if there are none. It falls with the number of texts:
    compare equally many."""
    found = [gram for text in texts for gram in ngrams(words(text), n)]
    return len(set(found)) / len(found) if found else math.nan


def self_bleu(texts: Sequence[str]) -> float:
    """The mean BLEU of each text with the others as references, 1 if all are equal; NaN for fewer than two."""
    spoken = [words(text) for text in texts]
    if len(spoken) < 2:
        return math.nan
    return sum(bleu(text, [*spoken[:k], *spoken[k + 1 :]]) for k, text in enumerate(spoken)) / len(spoken)


def bleu(text: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """BLEU-4: the geometric mean over n = 1..4 of the share of n-grams that occur in a reference, with counts clipped
    to the largest in a reference, times the brevity penalty for the reference of the nearest length."""
    logs: list[float] = []
    for n in range(1, min(LONGEST, len(text)) + 1):
        counts = Counter(ngrams(text, n))
        most: Counter[tuple[str, ...]] = Counter()
        for reference in references:
            most |= Counter(ngrams(reference, n))
        shared = sum((counts & most).values())
        logs.append(math.log((shared or UNSEEN) / counts.total()))
    if not logs:
        return 0.0
    nearest = min((abs(len(reference) - len(text)), len(reference)) for reference in references)[1]
    brevity = min(0.0, 1.0 - nearest / len(text))
    return math.exp(sum(logs) / len(logs) + brevity)
