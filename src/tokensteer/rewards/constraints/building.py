"""Making automata: from a function that moves states, with the fewest states, and combined with each other."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor

from tokensteer.core.numerics.rows import distinct, same_rows, unique
from tokensteer.rewards.constraints.automaton import Automaton
from tokensteer.rewards.constraints.masses import place_in
from tokensteer.rewards.constraints.transitions import live

MOST_STATES = 20_000
MOST_MINIMISED = 2_000  # larger automata keep their states

State = TypeVar("State", bound=Hashable)


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
    """The same language with the fewest classes and, up to MOST_MINIMISED states, the fewest states (Moore). States
    that cannot be reached are left out."""
    a = _of_distinct_columns(a)
    reached = _reached(a.step)
    step, accept = place_in(reached, len(a.step))[a.step[reached]], a.accept[reached]
    if len(step) <= MOST_MINIMISED:
        block = same_rows(accept.long().unsqueeze(-1))
        finer = _refine(block, step)
        while int(finer.max()) != int(block.max()):
            finer, block = _refine(finer, step), finer
        first, block = _in_order(finer)
        step, accept = block[step[first]], accept[first]
    return _of_distinct_columns(Automaton(step, a.classes, accept))


def _of_distinct_columns(a: Automaton) -> Automaton:
    first, column = _in_order(same_rows(a.step.T))
    return Automaton(a.step[:, first], column[a.classes], a.accept)


def _reached(step: Tensor) -> Tensor:
    """The states that can be reached from state 0, in the order in which they are found, 0 first."""
    seen = torch.zeros_like(step[:, 0], dtype=torch.bool)
    seen[0] = True
    found = [torch.zeros_like(step[0, :1])]
    while len(found[-1]):
        next_states = unique(step[found[-1]].flatten())[0]
        found.append(next_states[~seen[next_states]])
        seen[found[-1]] = True
    return torch.cat(found)


def _refine(block: Tensor, step: Tensor) -> Tensor:
    """Split blocks of states by the blocks that they move to."""
    return same_rows(torch.cat([block.unsqueeze(-1), block[step]], -1))


def _in_order(label: Tensor) -> tuple[Tensor, Tensor]:
    """Places of first appearance, and labels renumbered in that order, so that the start stays state 0."""
    first, row = distinct(label.unsqueeze(-1))
    order = first.argsort()
    return first[order], order.argsort()[row]


# ---- combining automata


def negate(a: Automaton) -> Automaton:
    """All sequences over the vocabulary that `a` rejects, also those with ids outside a pattern's alphabet."""
    return replace(a, accept=~a.accept)


def both(*automata: Automaton) -> Automaton:
    """Sequences that all of them accept."""
    return _combined("both", automata, torch.logical_and)


def either(*automata: Automaton) -> Automaton:
    """Sequences that at least one of them accepts."""
    return _combined("either", automata, torch.logical_or)


def ended(a: Automaton, ids: Iterable[int]) -> Automaton:
    """Sequences that `a` accepts, followed by any number of the tokens `ids`, which occur nowhere else: an end-of-text
    token, or padding."""
    end = torch.zeros_like(a.classes, dtype=torch.bool)
    chosen = list(ids)
    if not chosen or not all(0 <= token < a.vocab_size for token in chosen):
        raise ValueError(f"ended: give the ids of the tokens that end a text, each in 0..{a.vocab_size - 1}")
    end[chosen] = True
    states, classes = a.step.shape
    over, dead = states, states + 1
    step = torch.full((states + 2, classes + 1), dead, device=a.step.device)
    step[:states, :classes] = a.step
    step[:states, classes] = torch.where(a.accept, over, dead)
    step[over, classes] = over
    accept = torch.cat([a.accept, a.accept.new_tensor([True, False])])
    return minimal(Automaton(step, a.classes.masked_fill(end, classes), accept))


Combine = Callable[[Tensor, Tensor], Tensor]


def _combined(name: str, automata: Sequence[Automaton], combine: Combine) -> Automaton:
    if not automata:
        raise ValueError(f"{name}: give at least one automaton, such as contains([0], vocab_size)")
    # The smallest first: products stay small as long as possible.
    return reduce(lambda a, b: _pair(a, b, combine), sorted(automata, key=lambda a: len(a.step)))


def _pair(a: Automaton, b: Automaton, combine: Combine) -> Automaton:
    """The automaton of pairs of states that can be reached; all pairs from which nothing is accepted are one."""
    if a.vocab_size != b.vocab_size:
        raise ValueError(f"automata over {a.vocab_size} and {b.vocab_size} tokens: make them with one vocab_size")
    pairs = torch.stack([a.classes, b.classes], -1)
    first, classes = distinct(pairs)
    step_a, step_b = a.step[:, pairs[first, 0]], b.step[:, pairs[first, 1]]
    live_a, live_b = live(a.step, a.accept), live(b.step, b.accept)
    width, dead = len(b.step), len(a.step) * len(b.step)

    def move(code: Tensor) -> Tensor:
        at_a, at_b = step_a[code // width], step_b[code % width]
        return torch.where(combine(live_a[at_a], live_b[at_b]), at_a * width + at_b, dead)

    codes = torch.zeros_like(first[:1])
    level = codes
    while len(level):
        following = unique(move(level).flatten())[0]
        level = following[~torch.isin(following, codes) & (following != dead)]
        codes = torch.cat([codes, level])
        if len(codes) > MOST_STATES:
            raise ValueError(
                f"rules of {len(a.step)} and {len(b.step)} states need more than {MOST_STATES} together: leave one "
                "out, or make it simpler, with fewer words or a shorter length"
            )
    order = codes.argsort()
    to = move(codes)
    step = order[torch.searchsorted(codes[order], to).clamp(max=len(codes) - 1)]
    step = torch.cat([step.masked_fill(to == dead, len(codes)), torch.full_like(step[:1], len(codes))])
    accept = combine(a.accept[codes // width], b.accept[codes % width])
    return minimal(Automaton(step, classes, torch.cat([accept, accept.new_zeros(1)])))
