"""MaskGIT's order, with exact weights.

MaskGIT draws a token at every masked site and keeps those that rank best, by the probability of the token drawn plus
annealed noise. The rank depends on the draw, so the ratio over the kept tokens alone is wrong. Given the scores, which
p and q share, a move that keeps the tokens y at the sites S has probability

    prod_{l in S} mu^l(y^l) · prod_{l not in S} mu^l(tokens that rank below the worst kept).

The noise is drawn once for a particle and remembered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Generator, Tensor

from tokensteer.core.categorical.product import normalise_each, tilted
from tokensteer.core.categorical.sites import Categoricals, SiteDistributions, by_site, row_groups
from tokensteer.core.kernels.choices import Ranking
from tokensteer.core.kernels.kernel import Count, MaskedKernel, Memory, checked_count
from tokensteer.core.kernels.measure import SiteMeasure, Table, Tilting
from tokensteer.core.kernels.ranked import best_sites, cosine_count
from tokensteer.core.numerics.domains import check_callable, check_number
from tokensteer.core.numerics.draws import NEVER, uniforms
from tokensteer.core.particles.path import Sites, Step


@dataclass(frozen=True)
class RankedReveal(Tilting):
    """Draw a token at every candidate of the ranking `sites`, keep the `count` (P,) best; ties go to the lowest index.

    The mass of an unnormalised log_x0 counts at the sites kept, so that a product counts each site once, when it opens.
    Whole distributions and scores are computed a few rows at a time.
    """

    x: Tensor
    log_x0: SiteDistributions
    sites: Ranking
    count: Tensor
    mask_id: int
    log_mass: None = None
    factorises: ClassVar[bool] = False

    @property
    def candidates(self) -> Tensor:
        return self.sites.candidates

    def draw(self, generator: Generator | None) -> Tensor:
        """A token at every candidate site, x elsewhere."""
        return torch.where(self.candidates, self.log_x0.draw_one(self.candidates, self.mask_id, generator)[0], self.x)

    def keep(self, tokens: Tensor) -> Tensor:
        """x_s from tokens at all candidate sites."""
        scores = torch.cat([_entry(self.sites[few].scores(), tokens[few]) for few in row_groups(self.log_x0)])
        return torch.where(best_sites(scores, self.candidates, self.count), tokens, self.x)

    def sample(self, generator: Generator | None) -> Tensor:
        return self.keep(self.draw(generator))

    def log_prob(self, y: Tensor) -> Tensor:
        # The same groups of rows as in `keep`, and so the same numbers to the last bit: ties depend on that.
        own = self.sites.uses(self.log_x0)
        return torch.cat([self.take(few)._log_prob(y[few], own) for few in row_groups(self.log_x0)])

    def _log_prob(self, y: Tensor, own: bool) -> Tensor:
        """`log_prob` of a few rows; `own` if the ranking uses log_x0."""
        candidates, log_x0 = self.candidates, self.log_x0.dense()
        scores = self.sites.scores(log_x0 if own else None)
        kept = candidates & (y != self.mask_id)
        log_p = torch.where(kept, _entry(log_x0, y), 0.0)
        worst, last = _worst(_entry(scores, y), kept)
        row, site = (candidates & ~kept).nonzero(as_tuple=True)
        log_p[row, site] = _log_below(log_x0[row, site], scores[row, site], worst[row], site > last[row])
        right = (candidates | (y == self.x)).all(-1) & (kept.sum(-1) == self.count.minimum(candidates.sum(-1)))
        return log_p.sum(-1).masked_fill(~right, NEVER)

    def take(self, rows: Tensor) -> RankedReveal:
        return RankedReveal(self.x[rows], self.log_x0.take(rows), self.sites[rows], self.count[rows], self.mask_id)

    def normalise(self) -> RankedReveal:
        """The measure of normalised token distributions: a proposal for an unnormalised measure, not its multiple."""
        return replace(self, log_x0=normalise_each(self.log_x0, self.mask_id))

    def total(self) -> Tensor:
        """NaN: the total has no closed form if token distributions are unnormalised."""
        return torch.full(self.x.shape[:1], math.nan, dtype=self.log_x0.dtype, device=self.x.device)

    def with_mass(self, log_mass: Tensor | None) -> RankedReveal:
        """Unchanged: `normalise` does not divide by the mass, which is not known before the move."""
        return self

    def tilt(self, h: Categoricals) -> RankedReveal:
        """Tilt the token distributions; the ranking, which p and q share, stays."""
        return replace(self, log_x0=tilted(self.log_x0, by_site(h))).normalise()

    def pin(self, fixed: Tensor) -> RankedReveal:
        return replace(self, sites=self.sites.pin(fixed))

    def covers(self, other: SiteMeasure) -> bool:
        return all(self.take(few).dense().covers(other.take(few)) for few in row_groups(self.log_x0))

    def dense(self) -> Table:
        log_p = self.log_x0.dense().masked_fill(~self.candidates.unsqueeze(-1), NEVER)
        return Table(log_p.scatter(-1, self.x.unsqueeze(-1), 0.0), self.sites, x=self.x)


def _entry(table: Tensor, y: Tensor) -> Tensor:
    """table[..., y], (P, L)."""
    return table.gather(-1, y.unsqueeze(-1)).squeeze(-1)


def _worst(scores: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest score of a site kept and the last site with that score, (P,) each."""
    scores = scores.masked_fill(~kept, math.inf)
    worst, place = scores.amin(-1), torch.arange(kept.shape[-1], device=kept.device)
    return worst, torch.where(kept & (scores == worst.unsqueeze(-1)), place, -1).amax(-1)


def _log_below(log_x0: Tensor, scores: Tensor, worst: Tensor, after: Tensor) -> Tensor:
    """log of the probability that the token drawn at a dropped site ranks below the worst kept, (K,). log_x0 and scores
    are (K, V); `worst` (K,) is the score of the worst site kept, `after` (K,) whether the dropped site is behind it."""
    worst = worst.unsqueeze(-1)
    below = (scores < worst) | ((scores == worst) & after.unsqueeze(-1))
    total = log_x0.logsumexp(-1)
    return torch.where(total == NEVER, NEVER, log_x0.masked_fill(~below, NEVER).logsumexp(-1) - total)


@dataclass(frozen=True)
class MaskGIT(MaskedKernel):
    """Keep the `count` tokens of highest log mu^l(token) + temperature·s · Gumbel noise of the site, mask the others.

    p and q share the ranking, which `choose` makes from p's prediction. The noise is annealed to none at the end.
    """

    count: Count = cosine_count
    temperature: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_callable("MaskGIT.count", self.count, "step and masked: fixed(2) is one")
        check_number("MaskGIT.temperature", self.temperature, "[0, inf)")

    def remember(self, x: Tensor, before: Memory, log_x0: Categoricals | None, generator: Generator | None) -> Memory:
        """Gumbel noise for each site, (P, L)."""
        if self.temperature == 0:
            return None
        return -(-uniforms(tuple(x.shape), x, generator).log()).clamp(min=1e-300).log()

    def recall(self, x: Tensor, log_x0: Categoricals, step: Step, memory: Tensor) -> Ranking:
        lift = (self.temperature * step.s * memory).to(log_x0.dtype)
        return Ranking(by_site(log_x0), lift.masked_fill(x != self.mask_id, NEVER))

    def choose(self, x: Tensor, log_x0: Categoricals, step: Step) -> Ranking:
        return self.recall(x, log_x0, step, torch.zeros_like(x, dtype=log_x0.dtype))

    def __call__(self, x: Tensor, log_x0: Categoricals, step: Step, sites: Sites | None = None) -> RankedReveal:
        ranking = self.choose(x, log_x0, step) if sites is None else Ranking.of(sites)
        return RankedReveal(
            x, by_site(log_x0), ranking, checked_count(self.count, step, ranking.candidates.sum(-1)), self.mask_id
        )
