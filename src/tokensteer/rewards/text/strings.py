"""Rewards on strings: any function of texts, and a few that are often wanted.

A function takes a list of distinct texts and gives a number for each; `of_text` makes a reward on ids of it. Such a
reward has no gradient: it is estimated from draws, and followed by REINFORCE.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokensteer.core.numerics.domains import check_whole
from tokensteer.core.numerics.rows import distinct

TextFunction = Callable[[list[str]], Sequence[float] | Tensor]
Decode = Callable[[Tensor], list[str]]

SHOWN = 80  # characters of a text in an error


@dataclass(frozen=True, eq=False)
class OfText:
    """The reward function(decode(x0)) of ids x0 (P, L), asked once for each distinct text."""

    function: TextFunction
    decode: Decode
    differentiable: bool = field(default=False, init=False)

    def __call__(self, x0: Tensor) -> Tensor:
        if x0.is_floating_point():
            raise ValueError("a reward on text takes ids (P, L), not one-hots: use Tilt(..., differentiable=False)")
        first, row = distinct(x0)
        decoded = self.decode(x0[first])
        if len(decoded) != len(first):
            raise ValueError(f"decode must give a text for each of {len(first)} sequences, got {len(decoded)}")
        place = {text: k for k, text in enumerate(dict.fromkeys(decoded))}
        r = self._asked(list(place)).to(x0.device)
        return r[torch.tensor([place[text] for text in decoded], device=x0.device)][row]

    def _asked(self, texts: list[str]) -> Tensor:
        given = self.function(texts)
        exact = isinstance(given, Tensor) and given.is_floating_point()
        r = torch.as_tensor(given, dtype=None if exact else torch.float64).detach()
        if r.shape != (len(texts),):
            raise ValueError(
                f"the function must give a number for each of {len(texts)} texts, shape ({len(texts)},), got "
                f"{tuple(r.shape)}"
            )
        bad = r.isnan() | (r == torch.inf)
        if bad.any():
            worst = int(bad.int().argmax())
            text = texts[worst] if len(texts[worst]) <= SHOWN else texts[worst][:SHOWN] + "…"
            raise ValueError(f"the reward is {float(r[worst])} for the text {text!r}: it must be finite, or -inf")
        return r


def of_text(function: TextFunction, decode: Decode) -> OfText:
    """A reward on ids (P, L) from a function of a list of texts; `decode` takes ids, as tokenizer.batch_decode does."""
    return OfText(function, decode)


# ---- functions of texts. A word is found whole and whatever its case; spaces around its punctuation do not matter.


def letters_of(word: str) -> list[tuple[str, str]]:
    """The characters of a word or phrase in lower case, each with the spaces before it: "" for none, "+" where a space
    parts two letters, "*" for any number, beside punctuation."""
    found: list[tuple[str, str]] = []
    last, apart = "", False
    for c in word.strip().lower():
        if c.isspace():
            apart = True
            continue
        both_letters = is_letter(last) and is_letter(c)
        found.append((c, "" if not last or (both_letters and not apart) else "+" if both_letters else "*"))
        last, apart = c, False
    return found


def is_letter(c: str) -> bool:
    """Whether a character belongs to a word, as in Python's regular expressions."""
    return c.isalnum() or c == "_"  # and "" is none


def checked_words(words: Iterable[str]) -> list[str]:
    listed = [words] if isinstance(words, str) else list(words)
    if not listed or not all(word.strip() for word in listed):
        raise ValueError("give at least one word, and no empty one")
    return listed


def _finder(word: str) -> re.Pattern[str]:
    spelt = "".join((r"\s" + spaces if spaces else "") + re.escape(c) for c, spaces in letters_of(word))
    return re.compile(rf"(?<!\w){spelt}(?!\w)")


def mentions(words: Iterable[str]) -> TextFunction:
    """The share of the words that the text has."""
    finders = [_finder(word) for word in checked_words(words)]
    return lambda texts: [sum(f.search(text.lower()) is not None for f in finders) / len(finders) for text in texts]


def omits(words: Iterable[str]) -> TextFunction:
    """Minus the number of times that the text has one of the words."""
    finders = [_finder(word) for word in checked_words(words)]
    return lambda texts: [-float(sum(len(f.findall(text.lower())) for f in finders)) for text in texts]


def finds(pattern: str) -> TextFunction:
    """1 for texts in which Python's regular expression is found, 0 for others."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"finds: {pattern!r} is no regular expression: {error}") from error
    return lambda texts: [float(compiled.search(text) is not None) for text in texts]


def word_count(least: int, most: int) -> TextFunction:
    """Minus the number of words that are missing from `least` or beyond `most`; words are what spaces part."""
    check_whole("word_count: least", least, 0)
    check_whole("word_count: most", most, least)

    def count(texts: list[str]) -> list[float]:
        numbers = [len(text.split()) for text in texts]
        return [-float(max(least - n, n - most, 0)) for n in numbers]

    return count
