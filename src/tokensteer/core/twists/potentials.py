"""Potentials: the log-twist from estimates of the reward (Singhal et al., 2025; docs/references.md). The log-twist at
t = 0 is r/kl whatever the potential."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from tokensteer.core.numerics.domains import check_callable, check_flags
from tokensteer.core.particles.loop import described
from tokensteer.core.particles.path import Evaluation

PotentialRule = Callable[[float | Tensor, Tensor, Evaluation | None], tuple[Tensor, Tensor | None]]
"""(ramp(t)/kl, the estimate (P,), the parent) -> the log-twist (P,) and what the particle carries on, (P,) or None."""


@dataclass(frozen=True)
class Potential:
    """A rule, and what may be left out without changing it. `Potential(function)` leaves nothing out.

    `memoryless`: the log-twist depends on the present estimate alone, so estimates are reused, and skipped where no
    weight is read. `factors`: each step multiplies the weight by a factor, which is 1 where the ramp is 0, so that the
    estimate is skipped there and an adaptive ramp may fall.
    """

    rule: PotentialRule
    memoryless: bool = False
    factors: bool = False

    def __post_init__(self) -> None:
        check_callable(
            "Potential.rule", self.rule, "ramp(t)/kl, the estimates and the parent: potentials.total has one"
        )
        check_flags(self)

    def __call__(self, scale: float | Tensor, r: Tensor, parent: Evaluation | None) -> tuple[Tensor, Tensor | None]:
        found = cast("object", self.rule(scale, r, parent))
        parts = cast("tuple[object, ...]", found if isinstance(found, tuple) else (found,))
        match parts:
            case Tensor(shape=r.shape) as log_twist, (Tensor() | None) as carry:
                return log_twist, carry
            case _:
                raise ValueError(
                    f"Potential.rule must return a log-twist for each of {len(r)} particles, shape ({len(r)},), and "
                    f"what they carry on or None, got {', '.join(map(described, parts))}"
                )


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
