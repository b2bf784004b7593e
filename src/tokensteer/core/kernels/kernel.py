"""The interface of reverse kernels p(x_s | x_t), which are built from a prediction of the clean data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Generator, Tensor

from tokensteer.core.categorical.sites import Categoricals
from tokensteer.core.kernels.measure import SiteMeasure
from tokensteer.core.numerics.domains import check_whole
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.particles.path import Sites, Step

NO_MASK = -1
"""The mask id of kernels without a mask: it marks the free sites of a template."""

Sigma = Callable[[Step, float], float]
"""sigma(step, bound), the probability that an open site is masked again; at most `bound`."""

Count = Callable[[Step, Tensor], Tensor]
"""count(step, masked), how many sites open in each row, from the number of its masked sites: (P,) -> (P,)."""

Memory = Tensor | None
"""What a kernel remembers of each particle, (P, ...)."""


class Kernel(Protocol):
    """p(x_s | x_t) as a measure, which usually factorises over sites, given log p(x_0 | x_t).

    The prediction is a `SiteDistributions`, which computes only the distributions that are read, or a tensor (P, L, V);
    `by_site` converts the second into the first. `sites` is what `choose` returned for p or q, if it was called.
    """

    @property
    def mask_id(self) -> int:
        """The mask token; NO_MASK for a process without one, in which any site may change."""
        ...

    def choose(self, x: Tensor, log_x0: Categoricals, step: Step) -> Sites | None: ...
    def __call__(self, x: Tensor, log_x0: Categoricals, step: Step, sites: Sites | None = None) -> SiteMeasure: ...
    def survival(self, step: Step) -> float:
        """alpha_t / alpha_s, the probability that the forward process keeps a token between s and t."""
        ...

    def remasks(self, step: Step) -> bool:
        """Whether an open site may be masked again."""
        ...


class PlainKernel:
    """Defaults for kernels that choose no sites, never remask, and have no forward process."""

    def choose(self, x: Tensor, log_x0: Categoricals, step: Step) -> Sites | None:
        return None

    def remasks(self, step: Step) -> bool:
        return False

    def survival(self, step: Step) -> float:
        return 1.0


@dataclass(frozen=True)
class MaskedKernel(PlainKernel):
    """`PlainKernel` of a process with a mask token."""

    mask_id: int

    def __post_init__(self) -> None:
        check_whole(f"{type(self).__name__}.mask_id", self.mask_id, 0)


@runtime_checkable
class Stateful(Protocol):
    """A kernel whose choice of sites depends on more than x_t: on noise drawn for the step, or on earlier steps.

    `remember` returns the memory at x_t (P, ...), or None, from the parent's memory and prediction; it travels with the
    particle. `recall` is `choose` given that memory.
    """

    def remember(
        self, x: Tensor, before: Memory, log_x0: Categoricals | None, generator: Generator | None
    ) -> Memory: ...
    def recall(self, x: Tensor, log_x0: Categoricals, step: Step, memory: Tensor) -> Sites | None: ...


@runtime_checkable
class Clocked(Stateful, Protocol):
    """A kernel whose particles have their own times, kept in their memory, at which the denoiser is evaluated."""

    def times(self, memory: Tensor) -> Tensor:
        """When each particle moves, (P,)."""
        ...


def checked_count(count: Count, step: Step, masked: Tensor) -> Tensor:
    """count(step, masked), checked: a whole number for each row, (P,)."""
    found = count(step, masked)
    if not isinstance(found, Tensor) or found.shape != masked.shape or found.dtype != torch.int64:  # pyright: ignore[reportUnnecessaryIsInstance]
        got = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"count must return how many sites open in each of {len(masked)} rows, int64 of shape ({len(masked)},), "
            f"got {got}: ranked.fixed(2) is one such function"
        )
    return found


def safe_log(p: float) -> float:
    """log p, -inf at 0."""
    return math.log(p) if p > 0 else NEVER


def where_like(condition: Tensor, yes: float, no: float, like: Categoricals) -> Tensor:
    """where(condition, yes, no) in the dtype of `like`; torch.where would round two Python numbers to float32."""
    return torch.full(condition.shape, no, dtype=like.dtype, device=like.device).masked_fill_(condition, yes)
