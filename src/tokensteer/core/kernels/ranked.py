"""Kernels that rank sites by confidence: which masked sites open next.

The rank of a site comes from the prediction there. As long as it depends only on x_t and on noise that p and q share,
the ratio p/q runs over the newly opened sites. p and q share the choice, so `choose` makes it once and passes it on as
`sites`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokensteer.core.categorical.sites import Laws, SiteDistributions, tokens_of
from tokensteer.core.kernels.kernel import Count, PlainKernel, choice_of
from tokensteer.core.kernels.measure import Reveal
from tokensteer.core.numerics.domains import check_number, check_whole
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.particles.path import Step


def entry_at(table: Tensor, y: Tensor) -> Tensor:
    """table[..., y], (P, L)."""
    return table.gather(-1, y.unsqueeze(-1)).squeeze(-1)


def possible(scores: Tensor) -> Tensor:
    """Scores with -inf made the lowest number, so that -inf is left to say "takes no part"."""
    return scores.clamp(min=torch.finfo(scores.dtype).min)


def best_sites(scores: Tensor, among: Tensor, count: Tensor) -> Tensor:
    """The `count` (P,) sites of highest score among those allowed, (P, L); ties go to the lowest index."""
    order = possible(scores).masked_fill(~among, NEVER).sort(dim=-1, descending=True, stable=True).indices
    places = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
    rank = torch.empty_like(order).scatter_(-1, order, places)
    return among & (rank < count.unsqueeze(-1))


@dataclass(frozen=True)
class Ranking:
    """The score of each token at each site: log mu^l(token) + lift^l, with lift (P, L) -inf at sites that take no part.

    All scores are a table (P, L, V), which is large: they are spelt out a few rows at a time, whoever asks for them,
    so that all see the same numbers.
    """

    laws: SiteDistributions
    lift: Tensor

    @classmethod
    def of(cls, scores: Ranking | Tensor) -> Ranking:
        """A ranking, or a table of scores (P, L, V) as one."""
        if isinstance(scores, Ranking):
            return scores
        if scores.dim() != 3 or not scores.is_floating_point():
            raise ValueError(
                f"tokens are ranked by scores (P, L, V), -inf at sites that take no part, or by a Ranking; got "
                f"{str(scores.dtype).removeprefix('torch.')} of shape {tuple(scores.shape)}"
            )
        return cls(tokens_of(scores), torch.zeros_like(scores[..., 0]).masked_fill(scores[..., 0] == NEVER, NEVER))

    @property
    def candidates(self) -> Tensor:
        return self.lift != NEVER

    def __getitem__(self, rows: Tensor | slice) -> Ranking:
        return Ranking(replace(self.laws, index=self.laws.index[rows]), self.lift[rows])

    def pin(self, fixed: Tensor) -> Ranking:
        return replace(self, lift=self.lift.masked_fill(fixed, NEVER))

    def within(self, laws: Laws, block: slice) -> Ranking:
        """This ranking of a block of sites, on the canvas that the laws are of."""
        laws = tokens_of(laws)
        lift = torch.full(laws.index.shape, NEVER, dtype=self.lift.dtype, device=self.lift.device)
        lift[:, block] = self.lift
        return Ranking(laws, lift)

    def orders(self, laws: SiteDistributions) -> bool:
        """Whether these very laws are what it ranks by."""
        return self.laws.store is laws.store and self.laws.index is laws.index

    def spelt(self, laws: Tensor | None = None) -> Tensor:
        """All scores, (P, L, V), from laws (P, L, V) where they have been spelt out already."""
        lift = self.lift.unsqueeze(-1)
        return possible((self.laws.dense() if laws is None else laws) + lift).masked_fill_(lift == NEVER, NEVER)


def evenly(step: Step, masked: Tensor) -> Tensor:
    """Open masked·(t - s)/t sites, at least one while any is left: a steady pace that ends with none masked."""
    return (masked * ((step.t - step.s) / step.t)).round().long().clamp(min=1)


Confidence = Callable[[Tensor], Tensor]


# ---- how many


def fixed(number: int) -> Count:
    """Open `number` sites at every step, and what is left at the last."""
    check_whole("fixed: number", number, hint="at least one site must open at each step")
    return lambda step, masked: masked if step.s == 0 else torch.full_like(masked, number)


def cosine_count(step: Step, masked: Tensor) -> Tensor:
    """MaskGIT's pace: a share cos(pi/2 · (1 - t)) of sites is masked at t; at least one opens while any is left."""
    left = math.sin(math.pi / 2 * step.s) / math.sin(math.pi / 2 * step.t)
    return (masked - (masked * left + 1e-9).floor().long()).clamp(min=1)


# ---- confidences: from log mu (K, V) to (K,), higher is surer


def max_probability(log_x0: Tensor) -> Tensor:
    """max_v log mu^l(v), the default of `Ranked`."""
    return log_x0.amax(-1)


def negative_entropy(log_x0: Tensor) -> Tensor:
    """sum_v mu^l(v) log mu^l(v)."""
    return torch.where(log_x0 == NEVER, 0.0, log_x0.exp() * log_x0).sum(-1)


def margin(log_x0: Tensor) -> Tensor:
    """mu^l(first) - mu^l(second), between the two most likely tokens."""
    first, second = log_x0.topk(2, -1).values.exp().unbind(-1)
    return first - second


@dataclass(frozen=True)
class Ranked(PlainKernel):
    """Open the `count` masked sites of highest confidence, and every one whose confidence reaches `threshold`.

    By default the confidence is max_v mu^l(v), the low-confidence order of LLaDA; ties go to the lowest index.
    `count(step, masked)` returns how many sites open, from the number of masked sites of each row, (P,). The order
    depends on x_t alone, so the ratio p/q runs over the newly opened sites only.
    """

    mask_id: int
    count: Count = evenly
    confidence: Confidence = max_probability
    threshold: float = math.inf

    def __post_init__(self) -> None:
        check_whole("Ranked.mask_id", self.mask_id, 0)
        check_number("Ranked.threshold", self.threshold, "[-inf, inf]")

    def choose(self, x: Tensor, log_x0: Laws, step: Step) -> Tensor:
        masked = x == self.mask_id
        scores = tokens_of(log_x0).each(self.confidence, masked)
        best = best_sites(scores, masked, self.count(step, masked.sum(-1)))
        return best | (masked & (scores >= self.threshold))

    def __call__(self, x: Tensor, log_x0: Laws, step: Step, sites: Tensor | None = None) -> Reveal:
        sites = self.choose(x, log_x0, step) if sites is None else sites
        log_stay = choice_of(sites, NEVER, 0.0, log_x0)
        log_move = choice_of(sites, 0.0, NEVER, log_x0)
        return Reveal(x, log_stay, log_move, tokens_of(log_x0), self.mask_id, sites)
