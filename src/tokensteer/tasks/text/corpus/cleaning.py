"""Which texts of the language model are kept, and in what form.

Windows are shorter than most texts and end wherever they end, so texts are not cut here. Texts are left out that talk
about themselves or refuse, that have lists, headings or blanks to fill, that repeat themselves, or that repeat other
texts: `Seen` keeps hashes of an eighth of all runs of eight words, and a text of which a third is known is no new text.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

from tokensteer.tasks.common.wordpiece import words

SHORTEST = 60  # words
RUN = 8  # words of a run that two texts should not share
KEPT = 8  # one in so many runs is remembered
KNOWN = 1 / 3  # the largest share of known runs
VARIED = 0.9  # the least share of distinct runs of four words within a text

_PLAIN = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "..."})
_META = re.compile(
    r"\b(as an ai|language model|i cannot|i can't (help|write|assist)|i'm (sorry, but|unable to)|i am unable to|"
    r"here is (a|an|the|my|some)|here's (a|an|my)\b.{0,30}\b(review|story|letter|text|entry|version)|certainly!|"
    r"sure[,!]|of course[,!]|short sentences|simple sentences|short, simple|simple words|plain words|this prompt|"
    r"(this|the) (paragraph|sentence|assistant|narrator|following)|your name|word count|"
    r"i am writing a (story|text|review)|"
    r"in (this|the) (story|text|diary entry|letter|blog post|essay), (i|we|you)\b)",
    re.IGNORECASE,
)
_LAYOUT = re.compile(r"[\[\]{}<>|*#_=\\@~^]|https?:|\d\s*[.)]\s*[A-Z]|(^|\n)\s*[-•]|:\s*\n")


def cleaned(text: str) -> str | None:
    """The text in one line; None if it is not kept."""
    text = text.translate(_PLAIN).strip()
    if not text.isascii() or _LAYOUT.search(text) or _META.search(text):
        return None
    return " ".join(text.split())


def spoken(text: str) -> list[str] | None:
    """The words of a text that is kept; None if it is too short or repeats itself."""
    kept = cleaned(text)
    if kept is None:
        return None
    found = words(kept)
    if len(found) < SHORTEST or varied(found) < VARIED:
        return None
    return found


def varied(found: Sequence[str], run: int = 4) -> float:
    """The share of distinct runs among all runs of so many words."""
    runs = [tuple(found[k : k + run]) for k in range(len(found) - run + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0


def marks(found: Sequence[str]) -> list[int]:
    """Hashes of some runs of words, the same in every process: those that `KEPT` divides."""
    runs = (" ".join(found[k : k + RUN]) for k in range(len(found) - RUN + 1))
    return [hashed for hashed in (zlib.crc32(run.encode()) for run in runs) if hashed % KEPT == 0]


class Seen:
    """What was kept so far."""

    def __init__(self) -> None:
        self._marks: set[int] = set()

    def is_new(self, found: Sequence[int]) -> bool:
        """Whether a text with these `marks` is new; it is remembered if so."""
        known = sum(mark in self._marks for mark in found)
        if known > KNOWN * len(found):
            return False
        self._marks.update(found)
        return True
