"""The transitions of an automaton laid out over the sites of a sequence.

At each boundary between sites a run can be in few of the states: those that the sites before can reach and from which
the sites after can reach acceptance. They are numbered 0, 1, ... at each boundary, and one more number stands for all
others, from which nothing is accepted. Tables over boundaries and states are one block after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from tokensteer.rewards.constraints.masses import LOW, rows_of


class Edges(NamedTuple):
    """Transitions at a site by ascending source: target (E,) as numbered behind the site, label (E,), and those of
    number s are offsets[s]..offsets[s + 1]."""

    target: Tensor
    label: Tensor
    offsets: Tensor

    def sum(self, b: Tensor, mass: Tensor) -> Tensor:
        """sum over transitions of mass[label] · b[target], (S, P), from b (S', P) and masses of labels (K, P)."""
        weight = b.index_select(0, self.target).mul_(mass.index_select(0, self.label))
        return torch.segment_reduce(weight, "sum", offsets=self.offsets, axis=0)


@dataclass(frozen=True, eq=False)
class Trellis:
    """The edges of each site, and at each of the L + 1 boundaries the `states` (S_l,). `first` has the start of each
    boundary's block of S_l + 1 lines, and the end; `line` (L + 1, S + 1) the line of every state, and of none."""

    edges: list[Edges]
    states: list[Tensor]
    first: list[int]
    line: Tensor

    @classmethod
    def of(cls, source: Tensor, target: Tensor, label: Tensor, accept: Tensor, length: int) -> Trellis:
        """That of transitions (E,), by ascending source, for runs of this length from state 0 to `accept` (S,)."""
        after = [accept]
        for _ in range(length):
            after.append(torch.zeros_like(accept).index_fill(0, source[after[-1][target]], True))
        reached, alive = torch.zeros_like(accept), list[Tensor]()
        reached[0] = True
        for coming in reversed(after):
            alive.append(reached & coming)
            reached = torch.zeros_like(reached).index_fill(0, target[reached[source]], True)
        states, used = [rows_of(live) for live in alive], torch.stack(alive)
        place = torch.where(used, used.cumsum(-1) - 1, used.sum(-1, keepdim=True))
        edges = list[Edges]()
        for site in range(length):
            chosen = rows_of(alive[site][source] & alive[site + 1][target])
            count = torch.bincount(place[site][source[chosen]], minlength=len(states[site]) + 1)
            offsets = torch.cat([count.new_zeros(1), count.cumsum(0)])
            edges.append(Edges(place[site + 1][target[chosen]], label[chosen], offsets))
        first = list(accumulate((len(live) + 1 for live in states), initial=0))
        nowhere = torch.tensor(first[1:], device=place.device).unsqueeze(-1) - 1
        line = place + torch.tensor(first[:-1], device=place.device).unsqueeze(-1)
        return cls(edges, states, first, torch.cat([line, nowhere], 1))

    @property
    def mean_edges(self) -> float:
        return sum(len(edges.target) for edges in self.edges) / max(1, len(self.edges))

    def block(self, boundary: int) -> slice:
        """The lines of a boundary."""
        return slice(self.first[boundary], self.first[boundary + 1])

    def flat(self, log_b: Tensor) -> Tensor:
        """Logs (L + 1, S, P) of all states as lines of the trellis."""
        empty = log_b.new_full((1, log_b.shape[-1]), LOW)
        return torch.cat([part for b, states in zip(log_b, self.states, strict=True) for part in (b[states], empty)])
