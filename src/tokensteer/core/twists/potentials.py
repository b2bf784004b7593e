"""Potentials: log-twists from estimates of the reward, with what each particle must carry. All end in r/kl."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokensteer.core.particles.path import Evaluation

# From ramp(t)/kl, one for all or (P,), the estimate and the parent: the log-twist and what is to be carried along.
Potential = Callable[[float | Tensor, Tensor, Evaluation | None], tuple[Tensor, Tensor | None]]


# ---- potentials: log-twists from estimates, with what must be carried along; all end in r/kl, their final correction


def difference(scale: float | Tensor, r: Tensor, parent: Evaluation | None) -> tuple[Tensor, Tensor | None]:
    """psi_t = scale · r_hat: weights are differences of estimates."""
    return scale * r, None


def maximum(scale: float | Tensor, r: Tensor, parent: Evaluation | None) -> tuple[Tensor, Tensor | None]:
    """Each step multiplies by exp(scale · max of the estimates so far)."""
    highest = r if parent is None or parent.carry is None else torch.maximum(parent.carry, r)
    return scale * highest + (0.0 if parent is None else parent.log_twist), highest


def total(scale: float | Tensor, r: Tensor, parent: Evaluation | None) -> tuple[Tensor, Tensor | None]:
    """Each step multiplies by exp(scale · sum of the estimates so far)."""
    summed = r if parent is None or parent.carry is None else parent.carry + r
    return scale * summed + (0.0 if parent is None else parent.log_twist), summed
