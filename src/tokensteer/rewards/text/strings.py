"""Rewards on strings: `of_text` turns any function of texts into a reward on ids, and a few common functions.

A function takes a list of distinct texts and returns a number for each. Such a reward has no gradient: gradient
proposals use REINFORCE.
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
    """The reward function(decode(x0)) of ids x0 (P, L). The function takes a list of texts, and is called with distinct
    ones only; `decode` takes ids, as tokenizer.batch_decode does."""

    function: TextFunction
    decode: Decode
    differentiable: bool = field(default=False, init=False)

    def __call__(self, x0: Tensor) -> Tensor:
        if x0.is_floating_point():
            raise ValueError("a reward on text takes ids (P, L), not one-hots: use Tilt(..., differentiable=False)")
        first, row = distinct(x0)
        decoded = self.decode(x0[first])
        if len(decoded) != len(first):
            raise ValueError(f"decode must return a text for each of {len(first)} sequences, got {len(decoded)}")
        place = {text: k for k, text in enumerate(dict.fromkeys(decoded))}
        r = self._rewards(list(place)).to(x0.device)
        return r[torch.tensor([place[text] for text in decoded], device=x0.device)][row]

    def _rewards(self, texts: list[str]) -> Tensor:
        found = self.function(texts)
        floats = isinstance(found, Tensor) and found.is_floating_point()
        r = torch.as_tensor(found, dtype=None if floats else torch.float64).detach()
        if r.shape != (len(texts),):
            shape = f"shape ({len(texts)},), got {tuple(r.shape)}"
            raise ValueError(f"the function must return a number for each of {len(texts)} texts, {shape}")
        bad = r.isnan() | (r == torch.inf)
        if bad.any():
            worst = int(bad.int().argmax())
            text = texts[worst] if len(texts[worst]) <= SHOWN else texts[worst][:SHOWN] + "…"
            raise ValueError(f"the reward is {float(r[worst])} for the text {text!r}: it must be finite, or -inf")
        return r


of_text = OfText  # the public name


# ---- functions of texts. Words match whole, in any case, and with any spaces around their punctuation.


def letters_of(word: str) -> list[tuple[str, str]]:
    """The characters of a word or phrase in lower case, each with the spaces before it: "" for none, "+" between the
    letters of two words, "*" (any number) beside punctuation."""
    found: list[tuple[str, str]] = []
    last = ""
    for part in word.lower().split():
        for place, c in enumerate(part):
            both_letters = is_letter(last) and is_letter(c)
            found.append((c, "" if not last or (both_letters and place) else "+" if both_letters else "*"))
            last = c
    return found


def is_letter(c: str) -> bool:
    """Whether a character belongs to a word, as in Python's regular expressions; False for ""."""
    return c.isalnum() or c == "_"


def checked_words(words: Iterable[str]) -> list[str]:
    listed = [words] if isinstance(words, str) else list(words)
    if not listed or not all(word.strip() for word in listed):
        raise ValueError("give at least one word, and no empty one")
    return listed


def _finder(word: str) -> re.Pattern[str]:
    spelt = "".join((r"\s" + spaces if spaces else "") + re.escape(c) for c, spaces in letters_of(word))
    return re.compile(rf"(?<!\w){spelt}(?!\w)")


def mentions(words: Iterable[str]) -> TextFunction:
    """The share of the words that occur in the text."""
    finders = [_finder(word) for word in checked_words(words)]
    return lambda texts: [sum(f.search(text.lower()) is not None for f in finders) / len(finders) for text in texts]


def omits(words: Iterable[str]) -> TextFunction:
    """Minus the number of occurrences of the words in the text."""
    finders = [_finder(word) for word in checked_words(words)]
    return lambda texts: [-float(sum(len(f.findall(text.lower())) for f in finders)) for text in texts]


def finds(pattern: str) -> TextFunction:
    """1 for texts in which Python's `re` finds the pattern, 0 for others."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"finds: {pattern!r} is no regular expression: {error}") from error
    return lambda texts: [float(compiled.search(text) is not None) for text in texts]


def word_count(least: int, most: int) -> TextFunction:
    """Minus the number of words short of `least` or beyond `most`; words are separated by spaces."""
    check_whole("word_count: least", least, 0)
    check_whole("word_count: most", most, least)
    return lambda texts: [-float(max(least - n, n - most, 0)) for n in (len(text.split()) for text in texts)]
