"""Potentials: the log-twist from estimates of the reward (Singhal et al., 2025; docs/references.md). The log-twist at
t = 0 is r/kl whatever the potential."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokensteer.core.particles.path import Evaluation

PotentialRule = Callable[[float | Tensor, Tensor, Evaluation | None], tuple[Tensor, Tensor | None]]
"""(ramp(t)/kl, the estimate (P,), the parent) -> the log-twist (P,) and what the particle carries on, (P,) or None."""


@dataclass(frozen=True)
class Potential:
    """A rule, and what may be left out without changing it. `Tilt` wraps a plain function as `Potential(function)`.

    `memoryless`: the log-twist depends on the present estimate alone, so estimates are reused, and skipped where no
    weight is read. `factors`: each step multiplies the weight by a factor, which is 1 where the ramp is 0, so that the
    estimate is skipped there and an adaptive ramp may fall.
    """

    rule: PotentialRule
    memoryless: bool = False
    factors: bool = False

    def __call__(self, scale: float | Tensor, r: Tensor, parent: Evaluation | None) -> tuple[Tensor, Tensor | None]:
        return self.rule(scale, r, parent)


def _difference(scale: float | Tensor, r: Tensor, parent: Evaluation | None) -> tuple[Tensor, Tensor | None]:
    return scale * r, None


@dataclass(frozen=True)
class _Accumulate:
    """Each step multiplies the weight by exp(scale · the estimates so far, combined)."""

    combine: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, scale: float | Tensor, r: Tensor, parent: Evaluation | None) -> tuple[Tensor, Tensor | None]:
        combined = r if parent is None or parent.carry is None else self.combine(parent.carry, r)
        return scale * combined + (0.0 if parent is None else parent.log_twist), combined


difference = Potential(_difference, memoryless=True)
"""psi_t = scale · r_hat: weights are differences of estimates."""

maximum = Potential(_Accumulate(torch.maximum), factors=True)
"""Each step multiplies by exp(scale · max of the estimates so far)."""

total = Potential(_Accumulate(torch.add), factors=True)
"""Each step multiplies by exp(scale · sum of the estimates so far)."""
