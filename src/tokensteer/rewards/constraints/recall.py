"""What a look-ahead has computed, kept for the proposal of the same step and for states that do not move.

The masses of the vocabulary and the pass over sites are functions of a state and the prediction there. The twist and
the proposal read the same prediction, and a particle that stays where it is has the same one at the next step.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tokensteer.core.categorical.sites import SiteDistributions
from tokensteer.core.numerics.rows import distinct, same_rows
from tokensteer.rewards.constraints.automaton import Automaton
from tokensteer.rewards.constraints.final_masses import final_masses
from tokensteer.rewards.constraints.masses import Masses
from tokensteer.rewards.constraints.messages import Messages

ROOM = 2**30  # bytes of messages that are kept


class Solved(NamedTuple):
    """The masses and messages of states x (D, L), without remasking; `row` (R,) is the state of each row of the
    prediction's store, -1 for none."""

    store: weakref.ref[object]
    x: Tensor
    masses: Masses
    messages: Messages
    row: Tensor


@dataclass(eq=False)
class Recall:
    """The last states that were solved. With `timeless` a prediction depends on the state alone, so states are known
    again at the next step."""

    automaton: Automaton
    mask_id: int
    timeless: bool
    last: Solved | None = field(default=None, repr=False)

    def solve(self, x: Tensor, log_x0: SiteDistributions, fresh: bool) -> Tensor | None:
        """log V of states x (P, L), (P,), kept for `recalled`; None where it would take too much memory. With `fresh`
        nothing is known from before, so that a run does not depend on the one before it."""
        rows = _store_rows(log_x0)
        if rows is None or self._bytes(x) > ROOM:
            self.last = None
            return None
        first, _ = distinct(rows.unsqueeze(-1))
        states, before = x[first], None if fresh or not self.timeless else self.last
        known = _matches(states, None if before is None else before.x)
        new = (known < 0).nonzero().squeeze(-1)
        found = self._new(states[new], log_x0.take(first[new]))
        if before is not None:
            old = known[known >= 0]
            masses, messages = before.masses.take(old).join(found[0]), before.messages.take(old).join(found[1])
            found = masses, messages
        order = torch.cat([(known >= 0).nonzero().squeeze(-1), new])
        place = torch.full((int(rows.max()) + 1,), -1, device=x.device)
        place[rows[first[order]]] = torch.arange(len(order), device=x.device)
        self.last = Solved(weakref.ref(log_x0.store), states[order], *found, place)
        return found[1].log_v[place[rows]]

    def recalled(self, x: Tensor, log_x0: SiteDistributions) -> tuple[Masses, Messages, Tensor] | None:
        """The masses and messages that `solve` has found for this prediction, and the row in them of each of the states
        x (P, L), (P,); None if there are none."""
        last, rows = self.last, _store_rows(log_x0)
        if last is None or rows is None or last.store() is not log_x0.store or int(rows.max()) >= len(last.row):
            return None
        row = last.row[rows]
        if (row < 0).any() or not torch.equal(last.x[row], x):
            return None
        return last.masses, last.messages, row

    def _new(self, x: Tensor, log_x0: SiteDistributions) -> tuple[Masses, Messages]:
        masked = x == self.mask_id
        rho = torch.ones_like(x, dtype=torch.float64)
        masses = final_masses(self.automaton, rho, log_x0, self.mask_id, masked, masked).at(x)
        return masses, self.automaton.transitions.messages(masses)

    def _bytes(self, x: Tensor) -> int:
        return 8 * len(x) * self.automaton.transitions.trellis(x.shape[1]).first[-1]


def _store_rows(log_x0: SiteDistributions) -> Tensor | None:
    """The row of each particle (P,) in a store with L consecutive distributions a row; None for other stores."""
    index = log_x0.index
    length = index.shape[1]
    first = index[:, 0]
    in_order = index == first.unsqueeze(-1) + torch.arange(length, device=index.device)
    return first // length if bool(in_order.all() and (first % length == 0).all()) else None


def _matches(x: Tensor, known: Tensor | None) -> Tensor:
    """The row of `known` (D, L) that equals each row of x (P, L), (P,), -1 if there is none."""
    if known is None:
        return torch.full_like(x[:, 0], -1)
    label = same_rows(torch.cat([known, x]))
    place = torch.full((int(label.max()) + 1,), -1, device=x.device)
    place[label[: len(known)]] = torch.arange(len(known), device=x.device)
    return place[label[len(known) :]]
