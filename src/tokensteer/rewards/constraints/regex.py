"""Regular expressions over tokens as automata (Glushkov's construction)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor

from tokensteer.core.numerics.rows import distinct
from tokensteer.rewards.constraints.automaton import Automaton
from tokensteer.rewards.constraints.building import MOST_STATES, build


def regex(pattern: str, alphabet: Sequence[str], vocab_size: int | None = None) -> Automaton:
    r"""Sequences that match the pattern as a whole; token k is alphabet[k], ids beyond the alphabet never match.

    Literals, `.`, `|`, `*`, `+`, `?`, `{m}`, `{m,n}`, `( )`, `[abc]`, `[^abc]`, `[a-c]`; `<name>` is a token of several
    characters, and a backslash escapes the next character.
    """
    ids, vocab_size = checked_alphabet("regex", alphabet, vocab_size)
    places = Places()
    whole = Parser(pattern, ids, places).parse()()
    leaves = list(dict.fromkeys(places.leaves))
    classes, readers = classes_of(leaves, vocab_size)
    leaf_of = [leaves.index(leaf) for leaf in places.leaves]

    # A state is the set of places that may have read the last token; -1 is the start.
    def move(state: frozenset[int], c: int) -> frozenset[int]:
        after = (whole.first if place < 0 else places.follow[place] for place in state)
        return frozenset(place for follow in after for place in follow if leaf_of[place] in readers[c])

    last = whole.last | {-1} if whole.nullable else whole.last
    return build(frozenset({-1}), move, lambda state: not last.isdisjoint(state), classes, len(readers))


def checked_alphabet(name: str, alphabet: Sequence[str], vocab_size: int | None) -> tuple[dict[str, int], int]:
    """The ids of the tokens by name, and the size of the vocabulary."""
    ids = {token: k for k, token in enumerate(alphabet)}
    if len(ids) != len(alphabet) or not ids or "" in ids:
        raise ValueError(f"{name}: the alphabet must be distinct token names, none of them empty")
    if vocab_size is not None and vocab_size < len(ids):
        raise ValueError(f"{name}: vocab_size {vocab_size} is smaller than the alphabet of {len(ids)}")
    return ids, len(ids) if vocab_size is None else vocab_size


def classes_of(sets: Sequence[frozenset[int]], vocab_size: int) -> tuple[Tensor, list[frozenset[int]]]:
    """Classes (V,) of tokens that are in the same of the sets, and for each class the places of these sets."""
    reads = torch.zeros(vocab_size, len(sets), dtype=torch.bool)
    for k, tokens in enumerate(sets):
        reads[list(tokens), k] = True
    first, classes = distinct(reads.int()) if sets else (torch.zeros(1).long(), torch.zeros(vocab_size).long())
    return classes, [frozenset(k for k, tokens in enumerate(sets) if int(token) in tokens) for token in first]


@dataclass(frozen=True)
class Part:
    """The places that a part of a pattern may begin and end with, and whether it may be empty."""

    nullable: bool
    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()


EMPTY = Part(True)
Node = Callable[[], Part]  # adds a parsed part to the places; a repeat calls it once for each copy


@dataclass(frozen=True)
class Places:
    """A place for each token set of the pattern, and the places that may follow it."""

    leaves: list[frozenset[int]] = field(default_factory=list[frozenset[int]])
    follow: list[set[int]] = field(default_factory=list[set[int]])
    calls: dict[int, int] = field(default_factory=dict[int, int])  # the rules of places that stand for one

    def reference(self, rule: int) -> Part:
        """A place that stands for a rule, which reads what the rule's own pattern reads."""
        self.calls[len(self.leaves)] = rule
        return self.leaf(frozenset())

    def leaf(self, ids: frozenset[int]) -> Part:
        if len(self.leaves) == MOST_STATES:
            raise ValueError(f"regex: the pattern expands to more than {MOST_STATES} tokens: make it shorter")
        self.leaves.append(ids)
        self.follow.append(set())
        here = frozenset({len(self.leaves) - 1})
        return Part(False, here, here)

    def then(self, a: Part, b: Part) -> Part:
        for place in a.last:
            self.follow[place] |= b.first
        first = a.first | b.first if a.nullable else a.first
        return Part(a.nullable and b.nullable, first, a.last | b.last if b.nullable else b.last)

    def either(self, a: Part, b: Part) -> Part:
        return Part(a.nullable or b.nullable, a.first | b.first, a.last | b.last)

    def repeat(self, node: Node, low: int, high: int | None) -> Part:
        need = reduce(self.then, (node() for _ in range(low)), EMPTY)
        more = EMPTY
        if high is None:
            more = node()
            self.then(more, more)
            more = replace(more, nullable=True)
        else:  # nested as (r(r)?)?, so that each copy is followed by at most one
            for _ in range(high - low):
                more = replace(self.then(node(), more), nullable=True)
        return self.then(need, more)


class Parser:
    """A recursive-descent parser of patterns. The names in `rules` stand for other patterns."""

    def __init__(
        self, pattern: str, ids: Mapping[str, int], places: Places, rules: Mapping[str, int] | None = None
    ) -> None:
        self.pattern, self.ids, self.places, self.at = pattern, ids, places, 0
        self.rules: Mapping[str, int] = {} if rules is None else rules

    def parse(self) -> Node:
        node = self.choice()
        if self.peek():
            raise self.error("unbalanced )")
        return node

    def error(self, what: str, at: int | None = None) -> ValueError:
        return ValueError(f"regex: {what} at position {self.at if at is None else at} of {self.pattern!r}")

    def peek(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def take(self) -> str:
        c = self.peek()
        self.at += 1
        return c

    def choice(self) -> Node:
        options = [self.series()]
        while self.peek() == "|":
            self.take()
            options.append(self.series())
        return lambda: reduce(self.places.either, [option() for option in options])

    def series(self) -> Node:
        parts: list[Node] = []
        while self.peek() not in ("", "|", ")"):
            parts.append(self.repeated())
        return lambda: reduce(self.places.then, [part() for part in parts], EMPTY)

    def repeated(self) -> Node:
        marks = ("*", "+", "?", "{")
        if self.peek() in marks:
            raise self.error("nothing to repeat")
        node = self.single()
        if self.peek() not in marks:
            return node
        mark = self.take()
        low, high = self.bounds() if mark == "{" else {"*": (0, None), "+": (1, None), "?": (0, 1)}[mark]
        if self.peek() in marks:
            raise self.error("a repeat of a repeat (put the inner one in parentheses)")
        return lambda: self.places.repeat(node, low, high)

    def bounds(self) -> tuple[int, int | None]:
        at, end = self.at - 1, self.pattern.find("}", self.at)
        text = self.pattern[self.at : end] if end >= 0 else ""
        low, comma, high = text.partition(",")
        if not all(part == "" or (part.isascii() and part.isdigit()) for part in (low, high)) or not (low or high):
            raise self.error("a repeat that is not {m}, {m,}, {,n} or {m,n}", at)
        self.at = end + 1
        least = int(low or 0)
        most = int(high) if high else (None if comma else least)
        if most is not None and most < least:
            raise self.error(f"bad range {{{text}}}", at)
        return least, most

    def single(self) -> Node:
        at = self.at
        if self.peek() == "(":
            self.take()
            node = self.choice()
            if self.take() != ")":
                raise self.error("unbalanced (", at)
            return node
        if self.peek() == "[":
            ids = self.token_set()
        elif self.peek() == ".":
            self.take()
            ids = frozenset(self.ids.values())
        else:
            name = self.name()
            if len(name) > 1 and name in self.rules:
                rule = self.rules[name]
                return lambda: self.places.reference(rule)
            ids = frozenset({self.token(name, at)})
        return lambda: self.places.leaf(ids)

    def name(self) -> str:
        """A token's name: a character, an escaped one, or <name>."""
        at, c = self.at, self.take()
        if c == "\\":
            if not self.peek():
                raise self.error("a backslash with nothing after it", at)
            return self.take()
        if c != "<":
            return c
        end = self.pattern.find(">", self.at)
        if end < 0:
            raise self.error("unbalanced <", at)
        name, self.at = self.pattern[self.at : end], end + 1
        return name

    def token(self, name: str, at: int) -> int:
        if name not in self.ids:
            raise self.error(f"unknown token {name!r}", at)
        return self.ids[name]

    def token_set(self) -> frozenset[int]:
        start = self.at
        self.take()
        negated = self.peek() == "^"
        if negated:
            self.take()
        chosen: set[int] = set()
        while self.peek() != "]":
            if not self.peek():
                raise self.error("unbalanced [", start)
            at, name = self.at, self.name()
            if self.peek() == "-" and self.pattern[self.at + 1 : self.at + 2] not in ("]", ""):
                self.take()
                chosen |= self.span(name, self.name(), at)
            else:
                chosen.add(self.token(name, at))
        self.take()
        chosen = set(self.ids.values()) - chosen if negated else chosen
        if not chosen:
            raise self.error("a set without tokens", start)
        return frozenset(chosen)

    def span(self, low: str, high: str, at: int) -> set[int]:
        """The single-character tokens from `low` to `high` in the order of characters."""
        inside = {k for name, k in self.ids.items() if len(name) == 1 and low <= name <= high}
        if len(low) != 1 or len(high) != 1 or not inside:
            raise self.error(f"bad range {low}-{high}", at)
        return inside
