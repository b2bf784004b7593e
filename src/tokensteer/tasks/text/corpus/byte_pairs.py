"""Byte-level byte-pair encoding of English, with the tokens and merges of a GGUF file.

A text is split into single digits and, between them, as in GPT-2: words with the space before them, runs of other
signs, runs of spaces. The bytes of each part are merged, the pair of the lowest rank first. Texts that are encoded here
are prompts and samples in ASCII, for which `re` is enough; tokens of any language are decoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

_PARTS = re.compile(r"[0-9]|'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s+(?=$|[0-9])|\s+(?!\S)|\s+")


def _signs() -> dict[int, str]:
    """The printable sign that stands for each byte in GPT-2's tokens."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + k) for k, byte in enumerate(others)}


_SIGN = _signs()
_BYTE = {sign: byte for byte, sign in _SIGN.items()}


class BytePairs:
    """A tokenizer. `special` tokens, such as the ends of turns, are no text."""

    def __init__(self, tokens: Sequence[str], merges: Iterable[str], special: Iterable[int] = ()) -> None:
        self.tokens = list(tokens)
        self.special = frozenset(special)
        self._ranks = {tuple(merge.split(" ", 1)): rank for rank, merge in enumerate(merges)}
        self._merged: dict[str, list[int]] = {}

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> BytePairs:
        """The tokenizer in the metadata of a GGUF file."""
        names = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type")
        if any(name not in metadata for name in names):
            raise ValueError(f"the file has no byte pairs: it needs {', '.join(names)}")
        tokens, merges, kinds = (metadata[name] for name in names)
        return cls(tokens, merges, [k for k, kind in enumerate(kinds) if kind == 3])

    @cached_property
    def ids(self) -> dict[str, int]:
        return {token: k for k, token in enumerate(self.tokens)}

    def encode(self, text: str) -> list[int]:
        """The ids of a text in ASCII; other signs are left out."""
        return [k for part in _PARTS.findall(text.encode("ascii", "ignore").decode()) for k in self._merge(part)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids without special tokens. Bytes that are no UTF-8 become U+FFFD."""
        signs = "".join(self.tokens[k] for k in ids if k not in self.special)
        return bytes(_BYTE[sign] for sign in signs if sign in _BYTE).decode("utf-8", "replace")

    def _merge(self, part: str) -> list[int]:
        if part not in self._merged:
            signs = [_SIGN[byte] for byte in part.encode()]
            while len(signs) > 1:
                ranked = [self._ranks.get(pair, len(self._ranks)) for pair in pairwise(signs)]
                lowest = min(ranked)
                if lowest == len(self._ranks):
                    break
                k = ranked.index(lowest)
                signs[k : k + 2] = [signs[k] + signs[k + 1]]
            self._merged[part] = [self.ids[sign] for sign in signs]
        return self._merged[part]
