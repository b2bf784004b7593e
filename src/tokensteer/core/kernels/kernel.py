"""The interface of reverse kernels p(x_s | x_t), which are built from a prediction of the clean data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Generator, Tensor

from tokensteer.core.categorical.sites import Laws
from tokensteer.core.kernels.measure import SiteMeasure
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.particles.path import Sites, Step

NO_MASK = -1


Sigma = Callable[[Step, float], float]


Count = Callable[[Step, Tensor], Tensor]


class Kernel(Protocol):
    """p(x_s | x_t) as a measure, most often one that factorises over sites, given log p(x_0 | x_t).

    The prediction is a `SiteDistributions`, which computes only the distributions that are read, or a plain tensor
    (P, L, V); `tokens_of` converts the second into the first.
    """

    @property
    def mask_id(self) -> int:
        """The token that stands for what is not known; NO_MASK where any site may still change."""
        ...

    def choose(self, x: Tensor, log_x0: Laws, step: Step) -> Sites | None: ...
    def __call__(self, x: Tensor, log_x0: Laws, step: Step, sites: Sites | None = None) -> SiteMeasure: ...
    def survival(self, step: Step) -> float:
        """alpha_t / alpha_s, the probability that the forward process leaves a token alone between s and t."""
        ...

    def remasks(self, step: Step) -> bool:
        """Whether an open site may be masked again."""
        ...


class PlainKernel:
    """Defaults for kernels that choose no sites, never mask an open site again, and have no forward process to name."""

    def choose(self, x: Tensor, log_x0: Laws, step: Step) -> Sites | None:
        return None

    def remasks(self, step: Step) -> bool:
        return False

    def survival(self, step: Step) -> float:
        return 1.0


@runtime_checkable
class Stateful(Protocol):
    """A kernel whose choice of sites depends on more than x_t: on noise drawn for the step, or on what went before.

    `remember` makes the memory at x_t (P, ...), None for none, from the parent's memory and prediction; it travels with
    the particle. `recall` is `choose` with it.
    """

    def remember(
        self, x: Tensor, before: Tensor | None, log_x0: Laws | None, generator: Generator | None
    ) -> Tensor | None: ...
    def recall(self, x: Tensor, log_x0: Laws, step: Step, memory: Tensor) -> Sites | None: ...


@runtime_checkable
class Clocked(Stateful, Protocol):
    """A kernel whose particles have clocks of their own, kept in their memory: the denoiser is asked at these times."""

    def times(self, memory: Tensor) -> Tensor:
        """When each particle moves, (P,)."""
        ...


def log_or_never(p: float) -> float:
    return math.log(p) if p > 0 else NEVER


def choice_of(condition: Tensor, yes: float, no: float, like: Laws) -> Tensor:
    """where(condition, yes, no) in the precision of `like`: two bare numbers would be rounded to float32."""
    return torch.full(condition.shape, no, dtype=like.dtype, device=like.device).masked_fill_(condition, yes)
