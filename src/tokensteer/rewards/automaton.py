"""Finite automata over tokens: what a constraint on a sequence is made of.

A deterministic automaton reads a sequence site by site, s <- step[s, class of the token], and accepts it or not by the
state it ends in. Tokens that it never tells apart share a class, so its table is states × classes however large the
vocabulary. When sites are independent, the chance of acceptance is a dynamic programme backwards over sites,

    b_L[s] = accept[s],    b_l[s] = sum_c p_l[c] · b_{l+1}[step[s, c]],    P(accept) = b_0[0],

of cost L · states · classes, and drawing classes forwards with weights p_l[c] · b_{l+1}[step[s, c]] is an exact draw
of a sequence given acceptance. All of it in logs: a hopeful state may be a thousand orders of magnitude less likely
than its neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TypeVar

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from tokensteer.core.draws import NEVER, categorical, inverse_cdf, uniforms
from tokensteer.core.listing import distinct, same_rows

LOW = -1e30  # stands for log 0 inside the dynamic programme, where the gradient of -inf would be NaN
MOST_STATES = 20_000
CHEAP = 2_000  # states up to which automata are made minimal
CHUNK = 2**17  # entries of a table of tokens held at a time

State = TypeVar("State", bound=Hashable)


def safe_log(mass: Tensor) -> Tensor:
    """log, with LOW for zero and a finite gradient there; NaN stays NaN."""
    empty = mass == 0
    return torch.where(empty, 1.0, mass).log().masked_fill(empty, LOW)


@dataclass(frozen=True, eq=False)
class Automaton:
    """A deterministic automaton over token ids: step (S, C), classes (V,), accept (S,) bool; it starts in state 0."""

    step: Tensor
    classes: Tensor
    accept: Tensor

    def __post_init__(self) -> None:
        states, classes = self.step.shape
        if not states or self.accept.shape != (states,) or self.accept.dtype != torch.bool or self.classes.dim() != 1:
            raise ValueError("Automaton needs step (S, C), classes (V,) and accept (S,) of booleans")
        for name, table, size in (("step", self.step, states), ("classes", self.classes, classes)):
            if table.numel() and not (0 <= int(table.min()) and int(table.max()) < size):
                raise ValueError(f"Automaton.{name} must hold numbers in 0..{size - 1}")

    @property
    def vocab_size(self) -> int:
        return len(self.classes)

    def to(self, device: torch.device) -> Automaton:
        return replace(self, step=self.step.to(device), classes=self.classes.to(device), accept=self.accept.to(device))

    def accepts(self, x: Tensor) -> Tensor:
        """Whether each sequence of ids (P, L) is accepted, (P,)."""
        state = torch.zeros_like(x[:, 0])
        for c in self.classes[x].unbind(-1):
            state = self.step[state, c]
        return self.accept[state]

    def log_accept(self, log_p: Tensor) -> Tensor:
        """log P(accept) for independent sites with laws exp(log_p) (P, L, V), (P,) in double precision."""
        return self.log_chance(self.log_mass(log_p))

    def sample(self, log_p: Tensor, generator: Generator | None) -> Tensor:
        """A draw (P, L) from the independent sites of `log_p` (P, L, V), given that it is accepted."""
        log_mass = self.log_mass(log_p)
        if (self.log_chance(log_mass) == NEVER).any():
            raise ValueError("no sequence that these laws allow is accepted: there is nothing to draw from")
        return self.token_of(self.sample_classes(log_mass, generator), log_p, generator)

    def possible(self, length: int, allowed: Tensor | None = None) -> bool:
        """Whether a sequence of this length is accepted; `allowed` (V,) or (L, V) says which tokens it may have."""
        allowed = torch.ones_like(self.classes, dtype=torch.bool) if allowed is None else allowed
        of_class = allowed.new_zeros(*allowed.shape[:-1], self.step.shape[1], dtype=torch.int32)
        of_class = of_class.index_add(-1, self.classes, allowed.int()).expand(1, length, -1)
        return bool(self.log_chance(safe_log(of_class.bool().double())) > NEVER)

    # ---- the same on log-masses of classes (P, L, C), with LOW for none

    def log_mass(self, log_p: Tensor) -> Tensor:
        """The log-masses of the classes (..., C) under logs over tokens (..., V), added up in the precision of these
        and answered in double."""
        members = self._members().to(log_p.dtype)
        rows = max(1, CHUNK // max(1, self.vocab_size))
        parts = [self._log_mass(part, members) for part in torch.split(log_p.reshape(-1, self.vocab_size), rows)]
        return torch.cat(parts).view(*log_p.shape[:-1], members.shape[1])

    def _members(self) -> Tensor:
        return one_hot(self.classes, self.step.shape[1]).double()

    @staticmethod
    def _log_mass(log_p: Tensor, members: Tensor) -> Tensor:
        top = log_p.detach().amax(-1, keepdim=True).clamp(min=LOW)
        log_mass = safe_log(((log_p - top).exp() @ members).double())
        return torch.where(log_mass == LOW, LOW, log_mass + top)

    def point(self, x: Tensor) -> Tensor:
        """The log-masses of ids (...) that are certain, (..., C)."""
        certain = one_hot(self.classes[x], self.step.shape[1]).bool()
        return torch.where(certain, 0.0, LOW).double()

    def _backward(self, log_mass: Tensor) -> Iterable[Tensor]:
        """log b_l (S, P) for l = L, ..., 0. Particles lie last, so that the gather copies whole rows."""
        states, classes = self.step.shape
        to = self.step.flatten()
        b = torch.where(self.accept, 0.0, LOW).double().unsqueeze(-1).expand(-1, len(log_mass))
        yield b
        for log_p in reversed(log_mass.permute(1, 2, 0).contiguous().unbind()):
            b = (b.index_select(0, to).view(states, classes, -1) + log_p).logsumexp(1)
            yield b

    def log_chance(self, log_mass: Tensor) -> Tensor:
        """log P(accept), (P,)."""
        *_, b = self._backward(log_mass)
        return torch.where(b[0] < LOW / 2, NEVER, b[0])

    def sample_classes(self, log_mass: Tensor, generator: Generator | None) -> Tensor:
        """Classes (P, L) given acceptance; without meaning for rows that are never accepted."""
        messages = list(self._backward(log_mass))[-2::-1]
        u = uniforms(log_mass.shape[:2], log_mass, generator)
        state = torch.zeros_like(self.step[0, 0]).expand(len(log_mass))
        drawn: list[Tensor] = []
        for site, b in enumerate(messages):
            to = self.step[state]
            log_w = log_mass[:, site] + b.T.gather(-1, to)
            c = inverse_cdf((log_w - log_w.amax(-1, keepdim=True)).exp(), u[:, site, None])
            drawn.append(c)
            state = to.gather(-1, c).squeeze(-1)
        return torch.cat(drawn, -1)

    def token_of(self, c: Tensor, log_p: Tensor, generator: Generator | None) -> Tensor:
        """Tokens (...) of given classes c (...) under logs over tokens (..., V)."""
        return categorical(log_p.masked_fill(self.classes != c.unsqueeze(-1), NEVER), generator)


# ---- making automata


def _build(
    start: State, move: Callable[[State, int], State], accepts: Callable[[State], bool], classes: Tensor, number: int
) -> Automaton:
    """The automaton of all states in reach of `start`, made minimal."""
    index, found, rows = {start: 0}, [start], list[list[int]]()
    for state in found:  # it grows while it is read
        row: list[int] = []
        for c in range(number):
            to = move(state, c)
            if to not in index:
                if len(found) == MOST_STATES:
                    raise ValueError(f"the constraint needs more than {MOST_STATES} states: make it simpler")
                index[to] = len(found)
                found.append(to)
            row.append(index[to])
        rows.append(row)
    return minimal(Automaton(torch.tensor(rows), classes, torch.tensor([accepts(state) for state in found])))


def minimal(a: Automaton) -> Automaton:
    """The same language with the fewest states (Moore's refinement, up to CHEAP states) and classes."""
    step, accept = a.step, a.accept
    if len(step) <= CHEAP:
        block = same_rows(accept.long().unsqueeze(-1))
        finer = _refine(block, step)
        while int(finer.max()) != int(block.max()):
            finer, block = _refine(finer, step), finer
        first, block = _in_order(finer)
        step, accept = block[step[first]], accept[first]
    first, column = _in_order(same_rows(step.T))
    return Automaton(step[:, first], column[a.classes], accept)


def _refine(block: Tensor, step: Tensor) -> Tensor:
    """Blocks of states in one block that also move to the same blocks."""
    return same_rows(torch.cat([block.unsqueeze(-1), block[step]], -1))


def _in_order(label: Tensor) -> tuple[Tensor, Tensor]:
    """Labels renumbered by first appearance, so that the start stays state 0, and the place of each first one."""
    first, row = distinct(label.unsqueeze(-1))
    order = first.argsort()
    return first[order], order.argsort()[row]


def _check_ids(ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token {token} is outside the vocabulary 0..{vocab_size - 1}")


def _told_apart(ids: Iterable[int], vocab_size: int) -> tuple[Tensor, dict[int, int]]:
    """Classes (V,) that tell the given ids from each other and from the rest, which is class 0."""
    number = {token: k for k, token in enumerate(sorted(set(ids)), 1)}
    _check_ids(number, vocab_size)
    classes = torch.zeros(vocab_size, dtype=torch.long)
    classes[list(number)] = torch.tensor(list(number.values()), dtype=torch.long)
    return classes, number


def _finds(words: Sequence[Sequence[int]], vocab_size: int) -> Automaton:
    """Accepts sequences with one of the words in them (Aho and Corasick)."""
    if not words or not all(words):
        raise ValueError("give at least one substring, and no empty one")
    classes, number = _told_apart((token for word in words for token in word), vocab_size)
    trie, ends = [dict[int, int]()], [False]
    for word in words:
        node = 0
        for token in word:
            if number[token] not in trie[node]:
                trie[node][number[token]] = len(trie)
                trie.append({})
                ends.append(False)
            node = trie[node][number[token]]
        ends[node] = True
    step = [[0] * (len(number) + 1) for _ in trie]
    fail, queue = [0] * len(trie), [0]
    for node in queue:  # breadth first: the shorter suffix is always complete
        ends[node] |= ends[fail[node]]
        for c in range(len(number) + 1):
            back = step[fail[node]][c] if node else 0
            step[node][c] = child = trie[node].get(c, back)
            if c in trie[node]:
                fail[child] = back
                queue.append(child)
    for node, end in enumerate(ends):
        if end:
            step[node] = [node] * (len(number) + 1)
    return minimal(Automaton(torch.tensor(step), classes, torch.tensor(ends)))


def contains(ids: Sequence[int], vocab_size: int) -> Automaton:
    """Sequences with `ids` as a substring."""
    return _finds([ids], vocab_size)


def avoids(words: Sequence[Sequence[int]], vocab_size: int) -> Automaton:
    """Sequences with none of the words as a substring."""
    return negate(_finds(words, vocab_size))


def count(ids: Iterable[int], vocab_size: int, at_least: int = 0, at_most: int | None = None) -> Automaton:
    """Sequences with between `at_least` and `at_most` tokens among `ids`."""
    if at_least < 0 or (at_most is not None and at_most < at_least):
        raise ValueError(f"count: at_least = {at_least} and at_most = {at_most} leave nothing to count")
    classes, _ = _told_apart(ids, vocab_size)
    last = at_least if at_most is None else at_most + 1
    states = torch.arange(last + 1)
    accept = states >= at_least if at_most is None else (states >= at_least) & (states <= at_most)
    return Automaton(torch.stack([states, (states + 1).clamp(max=last)], -1), classes.clamp(max=1), accept)


def fixed(sites: Mapping[int, int | Sequence[int]], length: int, vocab_size: int) -> Automaton:
    """Sequences with a given token, or one of several, at each of the given sites.

    As many states as the last of these sites: where there is one token, a template is cheaper.
    """
    options = {site: {ids} if isinstance(ids, int) else set(ids) for site, ids in sites.items()}
    for site in options:
        if not 0 <= site < length:
            raise ValueError(f"fixed: site {site} is outside a sequence of length {length}")
    classes, number = _told_apart((token for ids in options.values() for token in ids), vocab_size)
    end = max(options, default=-1) + 1
    dead = end + 1
    step = torch.arange(1, end + 3).clamp(max=end).unsqueeze(-1).repeat(1, len(number) + 1)
    step[dead] = dead
    for site, ids in options.items():
        step[site] = dead
        step[site, [number[token] for token in ids]] = site + 1
    return Automaton(step, classes, torch.arange(end + 2) == end)


# ---- combining automata


def negate(a: Automaton) -> Automaton:
    """All sequences of the vocabulary that `a` does not accept, with ids outside a pattern's alphabet among them."""
    return replace(a, accept=~a.accept)


def both(*automata: Automaton) -> Automaton:
    """Sequences that all of them accept."""
    _some("both", automata)
    return reduce(lambda a, b: _pair(a, b, lambda p, q: p and q), automata)


def either(*automata: Automaton) -> Automaton:
    """Sequences that at least one of them accepts."""
    _some("either", automata)
    return reduce(lambda a, b: _pair(a, b, lambda p, q: p or q), automata)


def _some(name: str, automata: Sequence[Automaton]) -> None:
    if not automata:
        raise ValueError(f"{name}: give at least one automaton, such as contains([0], vocab_size)")


def _pair(a: Automaton, b: Automaton, combine: Callable[[bool, bool], bool]) -> Automaton:
    if a.vocab_size != b.vocab_size:
        raise ValueError(f"automata over {a.vocab_size} and over {b.vocab_size} tokens: give both one vocab_size")
    pairs = torch.stack([a.classes, b.classes], -1)
    first, classes = distinct(pairs)
    # Tables over joint classes, as lists: single entries of a tensor are slow to read.
    step_a, step_b = _listed(a.step[:, pairs[first, 0]]), _listed(b.step[:, pairs[first, 1]])
    accept_a, accept_b = _listed(a.accept.unsqueeze(-1)), _listed(b.accept.unsqueeze(-1))

    def move(state: tuple[int, int], c: int) -> tuple[int, int]:
        return step_a[state[0]][c], step_b[state[1]][c]

    def accepts(state: tuple[int, int]) -> bool:
        return combine(bool(accept_a[state[0]][0]), bool(accept_b[state[1]][0]))

    return _build((0, 0), move, accepts, classes, len(first))


def _listed(table: Tensor) -> list[list[int]]:
    return table.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


# ---- regular expressions


@dataclass(frozen=True)
class _Tokens:
    """One token out of a set."""

    ids: frozenset[int]


@dataclass(frozen=True)
class _Series:
    parts: tuple[_Node, ...]


@dataclass(frozen=True)
class _Choice:
    options: tuple[_Node, ...]


@dataclass(frozen=True)
class _Repeat:
    part: _Node
    low: int
    high: int | None


_Node = _Tokens | _Series | _Choice | _Repeat


def regex(pattern: str, alphabet: Sequence[str], vocab_size: int | None = None) -> Automaton:
    r"""Sequences that match the pattern as a whole; token k is alphabet[k], ids beyond the alphabet never match.

    Literals, `.`, `|`, `*`, `+`, `?`, `{m}`, `{m,n}`, `( )`, `[abc]`, `[^abc]`, `[a-c]`; `<name>` is a token of several
    characters, and a backslash takes the next character as it is.
    """
    ids = {name: k for k, name in enumerate(alphabet)}
    if len(ids) != len(alphabet) or not ids or "" in ids:
        raise ValueError("regex: the alphabet must be distinct token names, none of them empty")
    vocab_size = len(alphabet) if vocab_size is None else vocab_size
    if vocab_size < len(alphabet):
        raise ValueError(f"regex: vocab_size {vocab_size} is smaller than the alphabet of {len(alphabet)}")
    places = _Places()
    whole = places.add(_Parser(pattern, ids).parse())
    leaves = list(dict.fromkeys(places.leaves))
    reads = torch.zeros(vocab_size, len(leaves), dtype=torch.bool)
    for k, leaf in enumerate(leaves):
        reads[list(leaf), k] = True
    first, classes = distinct(reads.int()) if leaves else (torch.zeros(1).long(), torch.zeros(vocab_size).long())
    readers = [frozenset(k for k, leaf in enumerate(leaves) if int(token) in leaf) for token in first]
    leaf_of = [leaves.index(leaf) for leaf in places.leaves]

    # A state is the set of places that may have read the last token; -1 is before the first.
    def move(state: frozenset[int], c: int) -> frozenset[int]:
        after = (whole.first if place < 0 else places.follow[place] for place in state)
        return frozenset(place for follow in after for place in follow if leaf_of[place] in readers[c])

    last = whole.last | {-1} if whole.nullable else whole.last
    return _build(frozenset({-1}), move, lambda state: not last.isdisjoint(state), classes, len(readers))


@dataclass(frozen=True)
class _Part:
    """What a part of a pattern may begin with and end with, as places, and whether it may be empty."""

    nullable: bool
    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Places:
    """Glushkov's automaton: a place for each token set of the pattern, and the places that may follow it."""

    leaves: list[frozenset[int]] = field(default_factory=list[frozenset[int]])
    follow: list[set[int]] = field(default_factory=list[set[int]])

    def add(self, node: _Node) -> _Part:
        match node:
            case _Tokens(ids):
                if len(self.leaves) == MOST_STATES:
                    raise ValueError(f"regex: the pattern spells out more than {MOST_STATES} tokens: make it shorter")
                self.leaves.append(ids)
                self.follow.append(set())
                here = frozenset({len(self.leaves) - 1})
                return _Part(False, here, here)
            case _Series(parts):
                return reduce(self._then, map(self.add, parts), _Part(True))
            case _Choice(options):
                return reduce(self._or, map(self.add, options))
            case _Repeat(part, low, high):
                need = reduce(self._then, (self.add(part) for _ in range(low)), _Part(True))
                if high is None:
                    return self._then(need, self._loop(self.add(part)))
                more = _Part(True)  # nested from the inside, (r(r)?)?, so that each copy has one that may follow
                for _ in range(high - low):
                    more = replace(self._then(self.add(part), more), nullable=True)
                return self._then(need, more)

    def _then(self, a: _Part, b: _Part) -> _Part:
        for place in a.last:
            self.follow[place] |= b.first
        return _Part(
            a.nullable and b.nullable,
            a.first | b.first if a.nullable else a.first,
            a.last | b.last if b.nullable else b.last,
        )

    def _or(self, a: _Part, b: _Part) -> _Part:
        return _Part(a.nullable or b.nullable, a.first | b.first, a.last | b.last)

    def _loop(self, a: _Part) -> _Part:
        for place in a.last:
            self.follow[place] |= a.first
        return replace(a, nullable=True)


class _Parser:
    """A reader of patterns, by recursive descent."""

    def __init__(self, pattern: str, ids: Mapping[str, int]) -> None:
        self.pattern, self.ids, self.at = pattern, ids, 0

    def parse(self) -> _Node:
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

    def choice(self) -> _Node:
        options = [self.series()]
        while self.peek() == "|":
            self.take()
            options.append(self.series())
        return _Choice(tuple(options))

    def series(self) -> _Node:
        parts: list[_Node] = []
        while self.peek() not in ("", "|", ")"):
            parts.append(self.repeated())
        return _Series(tuple(parts))

    def repeated(self) -> _Node:
        if self.peek() in ("*", "+", "?", "{"):
            raise self.error("nothing to repeat")
        node = self.single()
        if self.peek() not in ("*", "+", "?", "{") or not self.peek():
            return node
        mark = self.take()
        low, high = self.bounds() if mark == "{" else {"*": (0, None), "+": (1, None), "?": (0, 1)}[mark]
        if self.peek() and self.peek() in "*+?{":
            raise self.error("a repeat of a repeat (put the inner one in parentheses)")
        return _Repeat(node, low, high)

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

    def single(self) -> _Node:
        at = self.at
        match self.peek():
            case "(":
                self.take()
                node = self.choice()
                if self.take() != ")":
                    raise self.error("unbalanced (", at)
                return node
            case "[":
                return _Tokens(self.token_set())
            case ".":
                self.take()
                return _Tokens(frozenset(self.ids.values()))
            case _:
                return _Tokens(frozenset({self.token(self.name(), at)}))

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
