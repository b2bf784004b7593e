"""Kernels that decide which sites open: those of highest confidence, or from left to right.

The confidence of a site comes from the prediction there. If it depends only on x_t and on noise that p and q share, the
ratio p/q runs over the newly opened sites. `choose` makes the choice once, and p and q share it as `sites`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokensteer.core.categorical.sites import Categoricals, by_site
from tokensteer.core.kernels.choices import finite, open_mask
from tokensteer.core.kernels.kernel import Count, MaskedKernel, checked_count, where_like
from tokensteer.core.kernels.measure import Reveal
from tokensteer.core.numerics.domains import check_callable, check_number, check_whole
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.particles.path import Sites, Step


def best_sites(scores: Tensor, among: Tensor, count: Tensor) -> Tensor:
    """The `count` (P,) sites of highest score among those allowed, (P, L); ties go to the lowest index."""
    order = finite(scores).masked_fill(~among, NEVER).sort(dim=-1, descending=True, stable=True).indices
    places = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
    rank = torch.empty_like(order).scatter_(-1, order, places)
    return among & (rank < count.unsqueeze(-1))


def evenly(step: Step, masked: Tensor) -> Tensor:
    """Open masked·(t - s)/t sites, at least one: equal numbers at equal steps, and none left at the end."""
    return (masked * ((step.t - step.s) / step.t)).round().long().clamp(min=1)


Confidence = Callable[[Tensor], Tensor]
"""From log mu (K, V) to a number for each site (K,), higher for a surer prediction."""


def fixed(number: int) -> Count:
    """Open `number` sites at every step, and all remaining ones at the last."""
    check_whole("fixed: number", number, hint="at least one site must open at each step")
    return lambda step, masked: masked if step.s == 0 else torch.full_like(masked, number)


def cosine_count(step: Step, masked: Tensor) -> Tensor:
    """MaskGIT's pace: a share cos(pi/2 · (1 - t)) of sites is masked at t; at least one opens."""
    left = math.sin(math.pi / 2 * step.s) / math.sin(math.pi / 2 * step.t)
    return (masked - (masked * left + 1e-9).floor().long()).clamp(min=1)


def max_probability(log_x0: Tensor) -> Tensor:
    """max_v log mu^l(v)."""
    return log_x0.amax(-1)


def negative_entropy(log_x0: Tensor) -> Tensor:
    """sum_v mu^l(v) log mu^l(v)."""
    return torch.where(log_x0 == NEVER, 0.0, log_x0.exp() * log_x0).sum(-1)


def margin(log_x0: Tensor) -> Tensor:
    """mu^l(first) - mu^l(second), between the two most likely tokens."""
    first, second = log_x0.topk(2, -1).values.exp().unbind(-1)
    return first - second


def opening(x: Tensor, log_x0: Categoricals, mask_id: int, opens: Tensor) -> Reveal:
    """The law of a step that opens exactly the sites `opens` (P, L)."""
    log_stay, log_move = where_like(opens, NEVER, 0.0, log_x0), where_like(opens, 0.0, NEVER, log_x0)
    return Reveal(x, log_stay, log_move, by_site(log_x0), mask_id, opens)


@dataclass(frozen=True)
class Ranked(MaskedKernel):
    """Open the `count` masked sites of highest confidence, and all whose confidence reaches `threshold`.

    By default the confidence is max_v log mu^l(v), the low-confidence order of LLaDA; ties go to the lowest index. The
    order depends on x_t alone, so the ratio p/q runs over the newly opened sites.
    """

    count: Count = evenly
    confidence: Confidence = max_probability
    threshold: float = math.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        check_callable("Ranked.count", self.count, "step and masked: fixed(2) is one")
        check_callable("Ranked.confidence", self.confidence, "log mu (K, V): max_probability is one")
        check_number("Ranked.threshold", self.threshold, "[-inf, inf]")

    def choose(self, x: Tensor, log_x0: Categoricals, step: Step) -> Tensor:
        masked = x == self.mask_id
        scores = by_site(log_x0).each(self._confidence, masked)
        best = best_sites(scores, masked, checked_count(self.count, step, masked.sum(-1)))
        return best | (masked & (scores >= self.threshold))

    def _confidence(self, log_x0: Tensor) -> Tensor:
        found = self.confidence(log_x0)
        if found.shape != log_x0.shape[:1]:
            raise ValueError(
                f"Ranked.confidence must return one number for each of {len(log_x0)} sites, shape ({len(log_x0)},), "
                f"got {tuple(found.shape)}"
            )
        return found.to(log_x0.dtype)

    def __call__(self, x: Tensor, log_x0: Categoricals, step: Step, sites: Sites | None = None) -> Reveal:
        opens = self.choose(x, log_x0, step) if sites is None else open_mask(sites)
        return opening(x, log_x0, self.mask_id, opens)


@dataclass(frozen=True)
class LeftToRight(MaskedKernel):
    """Open the first masked site of each of `count` equal parts of those that are masked.

    With as many steps as sites one opens at a time, as an autoregressive model writes. With fewer steps several cursors
    move to the right at equal distances, so that neighbours are hardly ever opened together.
    """

    count: Count = evenly

    def __post_init__(self) -> None:
        super().__post_init__()
        check_callable("LeftToRight.count", self.count, "step and masked: ranked.fixed(2) is one")

    def choose(self, x: Tensor, log_x0: Categoricals, step: Step) -> Tensor:
        masked = x == self.mask_id
        left = masked.sum(-1)
        count, left = checked_count(self.count, step, left).unsqueeze(-1), left.unsqueeze(-1).clamp(min=1)
        return masked & ((masked.cumsum(-1) - 1) * count % left < count)

    def __call__(self, x: Tensor, log_x0: Categoricals, step: Step, sites: Sites | None = None) -> Reveal:
        opens = self.choose(x, log_x0, step) if sites is None else open_mask(sites)
        return opening(x, log_x0, self.mask_id, opens)
