"""MaskGIT's order, with weights that are exact.

MaskGIT first draws a token at every masked site and then keeps those that rank best, by the probability of the token
drawn plus annealed noise. The rank depends on the draw, and the ratio over the kept tokens alone is wrong. Given the
scores, which p and q share, a move that keeps the tokens y at the sites S has probability

    prod_{l in S} mu^l(y^l) · prod_{l not in S} mu^l(tokens that rank below the worst kept),

`MaskGIT`; or all tokens drawn are part of the move and the ratio runs over every masked site, `MaskGITExtended`: the
same law of sequences, with weights of larger variance. The noise is drawn once for a particle and remembered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from tokensteer.core.categorical.product import normal, tilted
from tokensteer.core.categorical.sites import Laws, SiteDistributions, few_rows, tokens_of
from tokensteer.core.kernels.kernel import Count, PlainKernel
from tokensteer.core.kernels.measure import SiteMeasure, Table
from tokensteer.core.kernels.ranked import Ranking, best_sites, cosine_count, entry_at
from tokensteer.core.numerics.domains import check_number, check_whole
from tokensteer.core.numerics.draws import NEVER, uniforms
from tokensteer.core.numerics.rows import support
from tokensteer.core.particles.path import Sites, Step


@dataclass(frozen=True)
class RankedReveal:
    """Draw a token at every candidate site, keep the `count` that rank best; ties go to the lowest index.

    x (P, L); count (P,). The candidates are the sites that the ranking says take part. The measure does not factorise.
    Where log_x0 is not normalised its mass counts at the sites kept, so that a product counts each site once, when it
    opens. Laws and scores of all tokens are spelt out a few rows at a time.
    """

    x: Tensor
    log_x0: SiteDistributions
    ranking: Ranking
    count: Tensor
    mask_id: int
    log_mass: None = None

    @property
    def factorises(self) -> bool:
        return False

    @property
    def sites(self) -> Ranking:
        return self.ranking

    @property
    def candidates(self) -> Tensor:
        return self.ranking.candidates

    def draw(self, generator: Generator | None) -> Tensor:
        """A token at every candidate site, x elsewhere."""
        return torch.where(self.candidates, self.log_x0.draw_one(self.candidates, self.mask_id, generator)[0], self.x)

    def keep(self, tokens: Tensor) -> Tensor:
        """x_s from a full draw."""
        scores = torch.cat([entry_at(self.ranking[few].spelt(), tokens[few]) for few in self._few_rows()])
        return torch.where(best_sites(scores, self.candidates, self.count), tokens, self.x)

    def sample(self, generator: Generator | None) -> Tensor:
        return self.keep(self.draw(generator))

    def log_prob(self, y: Tensor) -> Tensor:
        own = self.ranking.orders(self.log_x0)
        return torch.cat([self.take(few)._log_prob(y[few], own) for few in self._few_rows()])

    def _few_rows(self) -> tuple[Tensor, ...]:
        """Whoever asks about the same particles sees the same rows together, and so the same numbers to the last bit:
        ties depend on that."""
        return few_rows(self.log_x0)

    def _log_prob(self, y: Tensor, own: bool) -> Tensor:
        """`log_prob` of few rows, whose ranking is by their `own` laws or by others."""
        candidates, log_x0 = self.candidates, self.log_x0.dense()
        scores = self.ranking.spelt(log_x0 if own else None)
        kept = candidates & (y != self.mask_id)
        log_p = torch.where(kept, entry_at(log_x0, y), 0.0)
        worst, last = _worst(entry_at(scores, y), kept)
        row, site = (candidates & ~kept).nonzero(as_tuple=True)
        log_p[row, site] = _log_below(log_x0[row, site], scores[row, site], worst[row], site > last[row])
        right = (candidates | (y == self.x)).all(-1) & (kept.sum(-1) == self.count.minimum(candidates.sum(-1)))
        return log_p.sum(-1).masked_fill(~right, NEVER)

    def take(self, rows: Tensor) -> RankedReveal:
        return RankedReveal(self.x[rows], self.log_x0.take(rows), self.ranking[rows], self.count[rows], self.mask_id)

    def normalise(self) -> RankedReveal:
        """Normalise the token laws. Of an unnormalised measure this is a proposal, not its normalised self."""
        return replace(self, log_x0=normal(self.log_x0, self.mask_id))

    def total(self) -> Tensor:
        """NaN: of token laws that are not normalised it is not known in closed form."""
        return torch.full(self.x.shape[:1], math.nan, dtype=self.log_x0.dtype, device=self.x.device)

    def with_mass(self, log_mass: Tensor | None) -> RankedReveal:
        """No mass to be known before the move: `normalise` does not divide by it."""
        return self

    def tilt(self, h: Laws) -> RankedReveal:
        """Tilt the token laws by exp(h) (P, L, V); the ranking stays, and with it what p and q share."""
        return replace(self, log_x0=tilted(self.log_x0, tokens_of(h))).normalise()

    def tilt_tokens(self, h: Laws) -> RankedReveal:
        return self.tilt(h)

    def pin(self, fixed: Tensor) -> RankedReveal:
        return replace(self, ranking=self.ranking.pin(fixed))

    def covers(self, other: SiteMeasure) -> bool:
        return all(self.take(few).dense().covers(other.take(few)) for few in self._few_rows())

    def dense(self) -> Table:
        """All that can be reached, with mass where there is any: for listing states, not the law itself."""
        log_p = self.log_x0.dense().masked_fill(~self.candidates.unsqueeze(-1), NEVER)
        return Table(log_p.scatter(-1, self.x.unsqueeze(-1), 0.0), self.ranking, x=self.x)

    def support(self, limit: int) -> tuple[Tensor, Tensor]:
        return support(self.dense().log_p, limit)


def _worst(scores: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The score of the worst site kept and its place, the last one at that score, (P,) each."""
    scores = scores.masked_fill(~kept, math.inf)
    worst, place = scores.amin(-1), torch.arange(kept.shape[-1], device=kept.device)
    return worst, torch.where(kept & (scores == worst.unsqueeze(-1)), place, -1).amax(-1)


def _log_below(log_x0: Tensor, scores: Tensor, worst: Tensor, after: Tensor) -> Tensor:
    """log of the probability that the token drawn at a dropped site ranks below the worst kept, (K,). log_x0 and scores
    are those of the dropped sites (K, V), worst (K,) that of the worst kept, `after` (K,) whether it comes first."""
    worst = worst.unsqueeze(-1)
    below = (scores < worst) | ((scores == worst) & after.unsqueeze(-1))
    total = log_x0.logsumexp(-1)
    return torch.where(total == NEVER, NEVER, log_x0.masked_fill(~below, NEVER).logsumexp(-1) - total)


@dataclass
class ExtendedReveal:
    """`RankedReveal` with all tokens drawn, kept or not, as part of the move.

    log_prob is that of the last draw, over every candidate site; -inf if y is not what was kept of it. The draw is
    shared through `sites`, so p weighs the very tokens that q drew. It cannot weigh a move it did not draw: no
    enumeration, no particle Gibbs.
    """

    ranked: RankedReveal
    tokens: Tensor | None = None
    log_mass: None = None

    @property
    def factorises(self) -> bool:
        return False

    @property
    def sites(self) -> Sites:
        return self.ranked.ranking if self.tokens is None else self.tokens

    def sample(self, generator: Generator | None) -> Tensor:
        self.tokens = self.ranked.draw(generator)
        return self.ranked.keep(self.tokens)

    def log_prob(self, y: Tensor) -> Tensor:
        if self.tokens is None:
            raise ValueError(
                "MaskGITExtended only weighs moves that it drew itself. Use MaskGIT, which has the same target"
            )
        log_x0, candidates, dropped = self.ranked.log_x0, self.ranked.candidates, y == self.ranked.mask_id
        log_p = log_x0.entry(self.tokens, candidates) - log_x0.mass(candidates & dropped)
        right = torch.where(dropped, candidates | (y == self.ranked.x), y == self.tokens).all(-1)
        return log_p.sum(-1).masked_fill(~right, NEVER)

    def take(self, rows: Tensor) -> ExtendedReveal:
        return ExtendedReveal(self.ranked.take(rows), None if self.tokens is None else self.tokens[rows])

    def normalise(self) -> ExtendedReveal:
        return replace(self, ranked=self.ranked.normalise())

    def total(self) -> Tensor:
        return self.ranked.total()

    def with_mass(self, log_mass: Tensor | None) -> ExtendedReveal:
        return self

    def tilt(self, h: Laws) -> ExtendedReveal:
        return replace(self, ranked=self.ranked.tilt(h))

    def tilt_tokens(self, h: Laws) -> ExtendedReveal:
        return self.tilt(h)

    def pin(self, fixed: Tensor) -> ExtendedReveal:
        return replace(self, ranked=self.ranked.pin(fixed))

    def covers(self, other: SiteMeasure) -> bool:
        return self.ranked.covers(other)

    def dense(self) -> Table:
        return self.ranked.dense()

    def support(self, limit: int) -> tuple[Tensor, Tensor]:
        return self.ranked.support(limit)


@dataclass(frozen=True)
class MaskGIT(PlainKernel):
    """Keep the `count` tokens of highest log mu^l(token) + temperature·s · Gumbel noise of the site, all else redrawn.

    The exact weight of what is kept, with the tokens dropped summed out: see the top of this module. p and q share the
    ranking, made by `choose` from p's prediction. The noise is annealed, none is left at the end.
    """

    mask_id: int
    count: Count = cosine_count
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if not callable(self.count):
            raise TypeError(f"MaskGIT.count must be a function of step and masked, got {self.count!r}: fixed(2) is one")
        check_whole("MaskGIT.mask_id", self.mask_id, 0)
        check_number("MaskGIT.temperature", self.temperature, "[0, inf)")

    def remember(
        self, x: Tensor, before: Tensor | None, log_x0: Laws | None, generator: Generator | None
    ) -> Tensor | None:
        """Gumbel noise for each site, (P, L)."""
        if self.temperature == 0:
            return None
        return -(-uniforms(tuple(x.shape), x, generator).log()).clamp(min=1e-300).log()

    def recall(self, x: Tensor, log_x0: Laws, step: Step, memory: Tensor) -> Ranking:
        lift = (self.temperature * step.s * memory).to(log_x0.dtype)
        return Ranking(tokens_of(log_x0), lift.masked_fill(x != self.mask_id, NEVER))

    def choose(self, x: Tensor, log_x0: Laws, step: Step) -> Ranking:
        return self.recall(x, log_x0, step, torch.zeros_like(x, dtype=log_x0.dtype))

    def __call__(self, x: Tensor, log_x0: Laws, step: Step, sites: Sites | None = None) -> RankedReveal:
        ranking = self.choose(x, log_x0, step) if sites is None else Ranking.of(sites)
        return RankedReveal(x, tokens_of(log_x0), ranking, self.count(step, ranking.candidates.sum(-1)), self.mask_id)


@dataclass(frozen=True)
class MaskGITExtended(PlainKernel):
    """`MaskGIT` on the extended state: all sampled tokens are part of the move, the ratio runs over all masked sites.

    Before a draw `sites` is the ranking, after it the tokens drawn (P, L), x where none was.
    """

    marginal: MaskGIT

    def __post_init__(self) -> None:
        if not isinstance(self.marginal, MaskGIT):  # pyright: ignore[reportUnnecessaryIsInstance]
            kind = type(self.marginal).__name__
            raise TypeError(f"MaskGITExtended extends a kernel, MaskGITExtended(MaskGIT(mask_id)), got {kind}")

    @property
    def mask_id(self) -> int:
        return self.marginal.mask_id

    def remember(
        self, x: Tensor, before: Tensor | None, log_x0: Laws | None, generator: Generator | None
    ) -> Tensor | None:
        return self.marginal.remember(x, before, log_x0, generator)

    def recall(self, x: Tensor, log_x0: Laws, step: Step, memory: Tensor) -> Ranking:
        return self.marginal.recall(x, log_x0, step, memory)

    def choose(self, x: Tensor, log_x0: Laws, step: Step) -> Ranking:
        return self.marginal.choose(x, log_x0, step)

    def __call__(self, x: Tensor, log_x0: Laws, step: Step, sites: Sites | None = None) -> ExtendedReveal:
        if sites is None or isinstance(sites, Ranking) or sites.is_floating_point():
            return ExtendedReveal(self.marginal(x, log_x0, step, sites))
        idle = (sites == self.mask_id) | (x != self.mask_id)
        return ExtendedReveal(self.marginal(x, log_x0, step, self.choose(x, log_x0, step).pin(idle)), sites)
