"""WordPiece, the tokenizer of BERT, in plain Python.

A text is lower-cased, loses its accents, and is split at spaces and around punctuation. Each word is spelt by the
longest pieces from the left; pieces within a word begin with ##. With BERT's own vocabulary these are BERT's tokens. A
smaller vocabulary with every single character spells rare words by more pieces.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tokensteer import files

MASK, UNKNOWN = "[MASK]", "[UNK]"
SPECIAL = (MASK, UNKNOWN, "[PAD]", "[CLS]", "[SEP]")
INNER = "##"
ENDS = frozenset(".,!?;:%)]}")  # pieces without a space before them
LONGEST = 100  # letters of a word that is still spelt

_TIGHT = re.compile(r" ([.,!?;:%)\]}]|\.\.\.)|([(\[{$#]) ")
_WITHIN = re.compile(r"(?<=\w) ?(['’]) ?(?=(?:t|s|re|ve|ll|d|m)\b)")
_JOINED = re.compile(r"(?<=\w) ([-/]) (?=\w)|(?<=\d) ([.,:]) (?=\d)")
_QUOTED = re.compile(r'" (.*?) "')
_DOTS = re.compile(r"\.(?: ?\.)+")


@dataclass(frozen=True)
class WordPiece:
    """Pieces, whose places are their ids, and their ids in the vocabulary they were taken from (`origin`)."""

    pieces: tuple[str, ...]
    origin: tuple[int, ...]
    _spelt: dict[str, list[int] | None] = field(default_factory=lambda: {}, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.pieces) != len(self.origin) or len(self.ids) != len(self.pieces):
            raise ValueError("a vocabulary needs pieces that differ, and for each its id in the vocabulary it is from")

    @classmethod
    def of(cls, pieces: Iterable[str]) -> WordPiece:
        """A whole vocabulary, such as the lines of BERT's vocab.txt."""
        listed = tuple(pieces)
        return cls(listed, tuple(range(len(listed))))

    @classmethod
    def read(cls, file: Path) -> WordPiece:
        """The vocabulary of a file that `write` wrote."""
        if not file.is_file():
            raise FileNotFoundError(f"there is no vocabulary {file}: give the folder that holds it beside the weights")
        try:
            listed = [line.split("\t") for line in lines(file)]
            return cls(tuple(piece for piece, _ in listed), tuple(int(origin) for _, origin in listed))
        except ValueError as error:
            raise ValueError(
                f"{file} is no vocabulary, lines of a piece, a tab and a number ({error}): copy it again from the "
                "folder that the weights are from"
            ) from error

    def write(self, file: Path) -> None:
        """One line for each piece: the piece, a tab, its origin."""
        rows = [f"{piece}\t{origin}\n" for piece, origin in zip(self.pieces, self.origin, strict=True)]
        files.write_text(file, "".join(rows))

    @cached_property
    def ids(self) -> dict[str, int]:
        return {piece: k for k, piece in enumerate(self.pieces)}

    @property
    def mask_id(self) -> int:
        return self.ids[MASK]

    def spell(self, word: str) -> list[int] | None:
        """The longest pieces from the left, None if they do not spell the word."""
        if word not in self._spelt:
            self._spelt[word] = self._longest_first(word)
        return self._spelt[word]

    def _longest_first(self, word: str) -> list[int] | None:
        found: list[int] = []
        start = 0
        while start < len(word) <= LONGEST:
            inner = INNER if start else ""
            ends = (end for end in range(len(word), start, -1) if inner + word[start:end] in self.ids)
            end = next(ends, None)
            if end is None:
                return None
            found.append(self.ids[inner + word[start:end]])
            start = end
        return found or None

    def encode(self, text: str) -> list[int]:
        """The ids of a text. A word that cannot be spelt is [UNK], or an error if there is no such piece."""
        found: list[int] = []
        for word in words(text):
            spelt = self.spell(word)
            if spelt is None and UNKNOWN not in self.ids:
                raise ValueError(f"the vocabulary cannot spell {word!r}: leave it out, or write it in plain letters")
            found += [self.ids[UNKNOWN]] if spelt is None else spelt
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, with usual spaces around punctuation."""
        return tidy(self._joined(ids))

    def _joined(self, ids: Sequence[int]) -> str:
        return " ".join(self.pieces[k] for k in ids).replace(f" {INNER}", "").removeprefix(INNER)

    def written(self, token: int) -> str:
        """A piece as it continues a text: with a space before it unless it is within a word or ends a phrase."""
        piece = self.pieces[token]
        return piece.removeprefix(INNER) if piece.startswith(INNER) or piece in ENDS else f" {piece}"

    # The interface of a tokenizer that `rewards.text` uses.

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def all_special_ids(self) -> list[int]:
        return [self.ids[piece] for piece in SPECIAL if piece in self.ids]

    def batch_decode(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> list[str]:
        special = set(self.all_special_ids) if skip_special_tokens else ()
        kept = ([k for k in ids if k not in special] for ids in sequences)
        return [self._joined(ids) if clean_up_tokenization_spaces is False else self.decode(ids) for ids in kept]


def lines(file: Path) -> list[str]:
    """The lines of a file, split at LF or CR LF only."""
    text = file.read_bytes().decode("utf-8").replace("\r\n", "\n")
    return text.removesuffix("\n").split("\n") if text else []


def words(text: str) -> list[str]:
    """The words of a text as in BERT: lower case, no accents, each punctuation mark by itself."""
    plain = "".join(" " if c.isspace() else c for c in text if not _is_control(c))
    plain = unicodedata.normalize("NFD", plain.lower())
    plain = "".join(c for c in plain if unicodedata.category(c) != "Mn")
    return "".join(f" {c} " if _stands_alone(c) else c for c in plain).split()


def tidy(text: str) -> str:
    """Usual spaces around punctuation: a guess, since tokens do not keep spaces."""
    text = _DOTS.sub(lambda dots: dots[0].replace(" ", ""), text)
    text = _WITHIN.sub(r"\1", text)
    text = _JOINED.sub(r"\1\2", text)
    text = _QUOTED.sub(r'"\1"', text)
    for _ in range(2):  # marks that follow one another share a space
        text = _TIGHT.sub(r"\1\2", text)
    return text


def _is_control(c: str) -> bool:
    return c == "\ufffd" or (c not in "\t\n\r" and unicodedata.category(c).startswith("C"))


def _stands_alone(c: str) -> bool:
    """Punctuation, all other ASCII symbols, and Chinese characters."""
    ascii_sign = "!" <= c <= "~" and not c.isalnum()
    chinese = "一" <= c <= "鿿" or "㐀" <= c <= "䶿" or "豈" <= c <= "﫿" or "\U00020000" <= c <= "\U0002ceaf"
    return ascii_sign or chinese or unicodedata.category(c).startswith("P")
