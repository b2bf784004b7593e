"""Finite automata over tokens, the form of all hard constraints on a sequence.

A deterministic automaton reads a sequence site by site, s <- step[s, class of the token], and accepts it if it ends in
an accepting state. Tokens with the same transitions share a class, so its table is states × classes whatever the size
of the vocabulary. If sites are independent, the probability of acceptance is a dynamic programme backwards over sites,

    b_L[s] = accept[s],    b_l[s] = sum_c p_l[c] · b_{l+1}[step[s, c]],    P(accept) = b_0[0],

of cost L · states · classes, and drawing classes forwards with weights p_l[c] · b_{l+1}[step[s, c]] draws a sequence
given acceptance, exactly. All of it is in logs, since probabilities of states differ by many orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeVar, cast

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from tokensteer.core.numerics.draws import NEVER, categorical, inverse_cdf, uniforms
from tokensteer.core.numerics.rows import distinct, same_rows

LOW = -1e30  # log 0 in the dynamic programme, where the gradient of -inf would be NaN
MOST_STATES = 20_000
MOST_MINIMISED = 2_000  # larger automata keep their states
CHUNK = 2**17  # entries of a (rows, V) table held at a time

State = TypeVar("State", bound=Hashable)


def safe_log(mass: Tensor) -> Tensor:
    """log, with LOW for zero and a finite gradient there; NaN stays NaN."""
    empty = mass == 0
    return torch.where(empty, 1.0, mass).log().masked_fill(empty, LOW)


@dataclass(frozen=True, eq=False)
class Automaton:
    """A deterministic automaton over token ids: step (S, C), classes (V,), accept (S,) bool; state 0 is the start."""

    step: Tensor
    classes: Tensor
    accept: Tensor

    def __post_init__(self) -> None:
        states, classes = self.step.shape
        if not states or self.accept.shape != (states,) or self.accept.dtype != torch.bool or self.classes.dim() != 1:
            raise ValueError("Automaton needs step (S, C), classes (V,) and boolean accept (S,)")
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
        """log P(accept) for independent sites with log-probabilities (P, L, V), (P,) in double precision."""
        return self.log_lookahead(self.log_mass(log_p))

    def sample(self, log_p: Tensor, generator: Generator | None) -> Tensor:
        """A draw (P, L) from independent sites with log-probabilities (P, L, V), given acceptance."""
        log_mass = self.log_mass(log_p)
        if (self.log_lookahead(log_mass) == NEVER).any():
            raise ValueError("no sequence of positive probability is accepted: there is nothing to draw from")
        return self.sample_tokens(self.sample_classes(log_mass, generator), log_p, generator)

    def possible(self, length: int, allowed: Tensor | None = None) -> bool:
        """Whether some sequence of this length, of the tokens `allowed` (V,) or (L, V), is accepted."""
        allowed = torch.ones_like(self.classes, dtype=torch.bool) if allowed is None else allowed
        of_class = allowed.new_zeros(*allowed.shape[:-1], self.step.shape[1], dtype=torch.int32)
        of_class = of_class.index_add(-1, self.classes, allowed.int()).expand(1, length, -1)
        return bool(self.log_lookahead(safe_log(of_class.bool().double())) > NEVER)

    # ---- the same on log-masses of classes (P, L, C), with LOW for log 0

    def log_mass(self, log_p: Tensor) -> Tensor:
        """Log-masses of the classes (..., C) in double precision, from those of the tokens (..., V); sums are in the
        precision of the input."""
        members = one_hot(self.classes, self.step.shape[1]).to(log_p.dtype)
        parts: list[Tensor] = []
        for part in torch.split(log_p.reshape(-1, self.vocab_size), max(1, CHUNK // max(1, self.vocab_size))):
            top = part.detach().amax(-1, keepdim=True).clamp(min=LOW)
            log_mass = safe_log(((part - top).exp() @ members).double())
            parts.append(torch.where(log_mass == LOW, LOW, log_mass + top))
        return torch.cat(parts).view(*log_p.shape[:-1], members.shape[1])

    def point(self, x: Tensor) -> Tensor:
        """Log-masses of the classes (..., C) when the ids x (...) are certain."""
        certain = one_hot(self.classes[x], self.step.shape[1]).bool()
        return torch.where(certain, 0.0, LOW).double()

    def _backward(self, log_mass: Tensor) -> Iterable[Tensor]:
        """log b_l (S, P) for l = L, ..., 0. Particles are the last axis, so that the gather copies whole rows."""
        states, classes = self.step.shape
        to = self.step.flatten()
        b = torch.where(self.accept, 0.0, LOW).double().unsqueeze(-1).expand(-1, len(log_mass))
        yield b
        for log_p in reversed(log_mass.permute(1, 2, 0).contiguous().unbind()):
            b = (b.index_select(0, to).view(states, classes, -1) + log_p).logsumexp(1)
            yield b

    def log_lookahead(self, log_mass: Tensor) -> Tensor:
        """log P(accept), (P,)."""
        *_, b = self._backward(log_mass)
        return torch.where(b[0] < LOW / 2, NEVER, b[0])

    def sample_classes(self, log_mass: Tensor, generator: Generator | None) -> Tensor:
        """Classes (P, L) given acceptance; meaningless for rows that are never accepted."""
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

    def sample_tokens(self, c: Tensor, log_p: Tensor, generator: Generator | None) -> Tensor:
        """Tokens (...) drawn from log-probabilities (..., V), given their classes c (...)."""
        return categorical(log_p.masked_fill(self.classes != c.unsqueeze(-1), NEVER), generator)


# ---- making automata


def build(
    start: State, move: Callable[[State, int], State], accepts: Callable[[State], bool], classes: Tensor, number: int
) -> Automaton:
    """The minimal automaton of all states that can be reached from `start`, over `number` classes."""
    index, found, rows = {start: 0}, [start], list[list[int]]()
    for state in found:  # grows in the loop
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
    """The same language with the fewest classes and, up to MOST_MINIMISED states, the fewest states (Moore)."""
    step, accept = a.step, a.accept
    if len(step) <= MOST_MINIMISED:
        block = same_rows(accept.long().unsqueeze(-1))
        finer = _refine(block, step)
        while int(finer.max()) != int(block.max()):
            finer, block = _refine(finer, step), finer
        first, block = _in_order(finer)
        step, accept = block[step[first]], accept[first]
    first, column = _in_order(same_rows(step.T))
    return Automaton(step[:, first], column[a.classes], accept)


def _refine(block: Tensor, step: Tensor) -> Tensor:
    """Split blocks of states by the blocks that they move to."""
    return same_rows(torch.cat([block.unsqueeze(-1), block[step]], -1))


def _in_order(label: Tensor) -> tuple[Tensor, Tensor]:
    """Places of first appearance, and labels renumbered in that order, so that the start stays state 0."""
    first, row = distinct(label.unsqueeze(-1))
    order = first.argsort()
    return first[order], order.argsort()[row]


def _classes(ids: Iterable[int], vocab_size: int) -> tuple[Tensor, dict[int, int]]:
    """Classes (V,), one for each of the ids, from 1, and 0 for all other tokens; and the class of each id."""
    number = {token: k for k, token in enumerate(sorted(set(ids)), 1)}
    for token in number:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token {token} is outside the vocabulary 0..{vocab_size - 1}")
    classes = torch.zeros(vocab_size, dtype=torch.long)
    classes[list(number)] = torch.tensor(list(number.values()), dtype=torch.long)
    return classes, number


def _finds(words: Sequence[Sequence[int]], vocab_size: int) -> Automaton:
    """Sequences with at least one of the words as a substring (Aho and Corasick)."""
    if not words or not all(words):
        raise ValueError("give at least one substring, and no empty one")
    classes, number = _classes((token for word in words for token in word), vocab_size)
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
    for node in queue:  # breadth first, so that the row of the shorter suffix is complete
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
        raise ValueError(f"count: at_least = {at_least} and at_most = {at_most} leave nothing to count: raise at_most")
    classes, _ = _classes(ids, vocab_size)
    last = at_least if at_most is None else at_most + 1
    states = torch.arange(last + 1)
    accept = states >= at_least if at_most is None else (states >= at_least) & (states <= at_most)
    return Automaton(torch.stack([states, (states + 1).clamp(max=last)], -1), classes.clamp(max=1), accept)


def fixed(sites: Mapping[int, int | Sequence[int]], length: int, vocab_size: int) -> Automaton:
    """Sequences with a given token, or one of several, at each of the given sites. It has as many states as the last
    of these sites; for one token per site a template is cheaper."""
    options = {site: {ids} if isinstance(ids, int) else set(ids) for site, ids in sites.items()}
    for site in options:
        if not 0 <= site < length:
            raise ValueError(f"fixed: site {site} is outside a sequence of length {length}")
    classes, number = _classes((token for ids in options.values() for token in ids), vocab_size)
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
    """All sequences over the vocabulary that `a` rejects, also those with ids outside a pattern's alphabet."""
    return replace(a, accept=~a.accept)


def both(*automata: Automaton) -> Automaton:
    """Sequences that all of them accept."""
    return _combined("both", automata, lambda p, q: p and q)


def either(*automata: Automaton) -> Automaton:
    """Sequences that at least one of them accepts."""
    return _combined("either", automata, lambda p, q: p or q)


def _combined(name: str, automata: Sequence[Automaton], combine: Callable[[bool, bool], bool]) -> Automaton:
    if not automata:
        raise ValueError(f"{name}: give at least one automaton, such as contains([0], vocab_size)")
    return reduce(lambda a, b: _pair(a, b, combine), automata)


def _pair(a: Automaton, b: Automaton, combine: Callable[[bool, bool], bool]) -> Automaton:
    if a.vocab_size != b.vocab_size:
        raise ValueError(f"automata over {a.vocab_size} and {b.vocab_size} tokens: make them with one vocab_size")
    pairs = torch.stack([a.classes, b.classes], -1)
    first, classes = distinct(pairs)
    # Tables over joint classes, as lists: single entries of a tensor are slow to read.
    step_a, step_b = _listed(a.step[:, pairs[first, 0]]), _listed(b.step[:, pairs[first, 1]])
    accept_a, accept_b = _listed(a.accept.unsqueeze(-1)), _listed(b.accept.unsqueeze(-1))

    def move(state: tuple[int, int], c: int) -> tuple[int, int]:
        return step_a[state[0]][c], step_b[state[1]][c]

    def accepts(state: tuple[int, int]) -> bool:
        return combine(bool(accept_a[state[0]][0]), bool(accept_b[state[1]][0]))

    return build((0, 0), move, accepts, classes, len(first))


def _listed(table: Tensor) -> list[list[int]]:
    return cast("list[list[int]]", table.cpu().numpy().tolist())
