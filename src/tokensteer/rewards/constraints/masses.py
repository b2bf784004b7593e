"""Masses of labels at sites, and helpers of the passes over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOW = -1e30  # log 0, where the gradient of -inf would be NaN


def safe_log(mass: Tensor) -> Tensor:
    """log, with LOW for zero and a finite gradient there; NaN stays NaN."""
    empty = mass == 0
    return torch.where(empty, 1.0, mass).log().masked_fill(empty, LOW)


@dataclass(frozen=True, eq=False)
class Masses:
    """What each site ends as. `labels` (P, L, K) has the masses of labels, at most 1 each. At the sites `certain`
    (P, L) the class is `classes` (P, L) for sure, and the masses are not read."""

    labels: Tensor
    certain: Tensor
    classes: Tensor

    def take(self, rows: Tensor) -> Masses:
        return Masses(self.labels[rows], self.certain[rows], self.classes[rows])

    def join(self, other: Masses) -> Masses:
        """These rows followed by the others."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("labels", "certain", "classes"))
        return Masses(*(torch.cat(pair) for pair in pairs))


def rows_of(where: Tensor) -> Tensor:
    """The rows at which a mask (P,) is true."""
    return where.nonzero().squeeze(-1)


def place_in(chosen: Tensor, size: int) -> Tensor:
    """The place in `chosen` (n,) of each of 0, ..., size - 1, and -1 for those that are not there."""
    places = torch.full((size,), -1, device=chosen.device)
    return places.index_copy(0, chosen, torch.arange(len(chosen), device=chosen.device))
