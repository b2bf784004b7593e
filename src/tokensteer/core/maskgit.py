"""MaskGIT's order, with weights that are exact.

MaskGIT first draws a token at every masked site and then keeps those that rank best, by the probability of the token
drawn plus annealed noise. The rank depends on the draw, and the ratio over the kept tokens alone is wrong. Given the
ranking table, which p and q share, a move that keeps the tokens y at the sites S has probability

    prod_{l in S} mu^l(y^l) · prod_{l not in S} mu^l(tokens that rank below the worst kept),

`MaskGIT`; or all tokens drawn are part of the move and the ratio runs over every masked site, `MaskGITExtended`: the
same law of sequences, with weights of larger variance. The noise is drawn once for a particle and remembered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from tokensteer.core.draws import NEVER, categorical, uniforms
from tokensteer.core.kernel import Count
from tokensteer.core.listing import support
from tokensteer.core.measure import SiteMeasure, Table
from tokensteer.core.orders import best_sites, cosine_count, entry_at, possible
from tokensteer.core.schedule import Step
from tokensteer.core.tokens import Laws, dense_of


@dataclass(frozen=True)
class RankedReveal:
    """Draw a token at every candidate site, keep the `count` that rank best; ties go to the lowest index.

    x (P, L); log_x0 (P, L, V); ranking (P, L, V), the score of each token, -inf at sites that are no candidates; count
    (P,). The measure does not factorise. Where log_x0 is not normalised its mass counts at the sites kept, so that a
    product counts each site once, when it opens.
    """

    x: Tensor
    log_x0: Tensor
    ranking: Tensor
    count: Tensor
    mask_id: int
    log_mass: None = None

    @property
    def factorises(self) -> bool:
        return False

    @property
    def sites(self) -> Tensor:
        return self.ranking

    @property
    def candidates(self) -> Tensor:
        return self.ranking[..., 0] != NEVER

    def draw(self, generator: Generator | None) -> Tensor:
        """A token at every candidate site, x elsewhere."""
        candidates, tokens = self.candidates, self.x.clone()
        tokens[candidates] = categorical(self.log_x0[candidates], generator)
        return tokens

    def keep(self, tokens: Tensor) -> Tensor:
        """x_s from a full draw."""
        return torch.where(best_sites(entry_at(self.ranking, tokens), self.candidates, self.count), tokens, self.x)

    def sample(self, generator: Generator | None) -> Tensor:
        return self.keep(self.draw(generator))

    def log_prob(self, y: Tensor) -> Tensor:
        candidates = self.candidates
        kept = candidates & (y != self.mask_id)
        log_p = torch.where(kept, entry_at(self.log_x0, y), 0.0)
        row, site = (candidates & ~kept).nonzero(as_tuple=True)
        log_p[row, site] = self._log_below(*self._worst(y, kept), row, site)
        right = (candidates | (y == self.x)).all(-1) & (kept.sum(-1) == self.count.minimum(candidates.sum(-1)))
        return log_p.sum(-1).masked_fill(~right, NEVER)

    def _worst(self, y: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """The score of the worst site kept and its place, the last one at that score, (P,) each."""
        score = entry_at(self.ranking, y).masked_fill(~kept, math.inf)
        worst = score.amin(-1)
        place = torch.arange(y.shape[-1], device=y.device)
        return worst, torch.where(kept & (score == worst.unsqueeze(-1)), place, -1).amax(-1)

    def _log_below(self, worst: Tensor, last: Tensor, row: Tensor, site: Tensor) -> Tensor:
        """log of the probability that the token drawn at a dropped site ranks below the worst kept, (K,)."""
        log_x0, ranking, score = self.log_x0[row, site], self.ranking[row, site], worst[row].unsqueeze(-1)
        below = (ranking < score) | ((ranking == score) & (site > last[row]).unsqueeze(-1))
        total = log_x0.logsumexp(-1)
        return torch.where(total == NEVER, NEVER, log_x0.masked_fill(~below, NEVER).logsumexp(-1) - total)

    def take(self, rows: Tensor) -> RankedReveal:
        return RankedReveal(self.x[rows], self.log_x0[rows], self.ranking[rows], self.count[rows], self.mask_id)

    def normalise(self) -> RankedReveal:
        """Normalise the token laws. Of an unnormalised measure this is a proposal, not its normalised self."""
        return replace(self, log_x0=self.log_x0.log_softmax(-1))

    def total(self) -> Tensor:
        """NaN: of token laws that are not normalised it is not known in closed form."""
        return torch.full_like(self.log_x0[:, 0, 0], math.nan)

    def with_mass(self, log_mass: Tensor | None) -> RankedReveal:
        """No mass to be known before the move: `normalise` does not divide by it."""
        return self

    def tilt(self, h: Laws) -> RankedReveal:
        """Tilt the token laws by exp(h) (P, L, V); the ranking stays, and with it what p and q share."""
        return replace(self, log_x0=self.log_x0 + dense_of(h)).normalise()

    def tilt_tokens(self, h: Laws) -> RankedReveal:
        return self.tilt(h)

    def pin(self, fixed: Tensor) -> RankedReveal:
        return replace(self, ranking=self.ranking.masked_fill(fixed.unsqueeze(-1), NEVER))

    def covers(self, other: SiteMeasure) -> bool:
        return self.dense().covers(other)

    def dense(self) -> Table:
        """All that can be reached, with mass where there is any: for listing states, not the law itself."""
        log_p = self.log_x0.masked_fill(~self.candidates.unsqueeze(-1), NEVER)
        return Table(log_p.scatter(-1, self.x.unsqueeze(-1), 0.0), self.ranking, x=self.x)

    def support(self, limit: int) -> tuple[Tensor, Tensor]:
        return support(self.dense().log_p, limit)


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
    def sites(self) -> Tensor:
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
        log_p = entry_at(log_x0, self.tokens) - torch.where(dropped, log_x0.logsumexp(-1), 0.0)
        right = torch.where(dropped, candidates | (y == self.ranked.x), y == self.tokens).all(-1)
        return torch.where(candidates, log_p, 0.0).sum(-1).masked_fill(~right, NEVER)

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
class MaskGIT:
    """Keep the `count` tokens of highest log mu^l(token) + temperature·s · Gumbel noise of the site, all else redrawn.

    The exact weight of what is kept, with the tokens dropped summed out: see the top of this module. p and q share the
    ranking table (P, L, V), made by `choose` from p's prediction. The noise is annealed, none is left at the end.
    """

    mask_id: int
    count: Count = cosine_count
    temperature: float = 0.0

    def remember(
        self, x: Tensor, before: Tensor | None, log_x0: Laws | None, generator: Generator | None
    ) -> Tensor | None:
        """Gumbel noise for each site, (P, L)."""
        if self.temperature == 0:
            return None
        return -(-uniforms(tuple(x.shape), x, generator).log()).clamp(min=1e-300).log()

    def recall(self, x: Tensor, log_x0: Laws, step: Step, memory: Tensor) -> Tensor | None:
        log_x0 = dense_of(log_x0)
        scores = log_x0 + (self.temperature * step.s * memory).to(log_x0.dtype).unsqueeze(-1)
        return possible(scores).masked_fill((x != self.mask_id).unsqueeze(-1), NEVER)

    def choose(self, x: Tensor, log_x0: Laws, step: Step) -> Tensor | None:
        return self.recall(x, log_x0, step, torch.zeros_like(x, dtype=log_x0.dtype))

    def remasks(self, step: Step) -> bool:
        return False

    def survival(self, step: Step) -> float:
        return 1.0

    def __call__(self, x: Tensor, log_x0: Laws, step: Step, sites: Tensor | None = None) -> RankedReveal:
        ranking = self.choose(x, log_x0, step) if sites is None else sites
        assert ranking is not None
        count = self.count(step, (ranking[..., 0] != NEVER).sum(-1))
        return RankedReveal(x, dense_of(log_x0), ranking, count, self.mask_id)


@dataclass(frozen=True)
class MaskGITExtended:
    """`MaskGIT` on the extended state: all sampled tokens are part of the move, the ratio runs over all masked sites.

    Before a draw `sites` is the ranking table, after it the tokens drawn (P, L), x where none was.
    """

    marginal: MaskGIT

    @property
    def mask_id(self) -> int:
        return self.marginal.mask_id

    def remember(
        self, x: Tensor, before: Tensor | None, log_x0: Laws | None, generator: Generator | None
    ) -> Tensor | None:
        return self.marginal.remember(x, before, log_x0, generator)

    def recall(self, x: Tensor, log_x0: Laws, step: Step, memory: Tensor) -> Tensor | None:
        return self.marginal.recall(x, log_x0, step, memory)

    def choose(self, x: Tensor, log_x0: Laws, step: Step) -> Tensor | None:
        return self.marginal.choose(x, log_x0, step)

    def remasks(self, step: Step) -> bool:
        return False

    def survival(self, step: Step) -> float:
        return 1.0

    def __call__(self, x: Tensor, log_x0: Laws, step: Step, sites: Tensor | None = None) -> ExtendedReveal:
        if sites is None or sites.is_floating_point():
            return ExtendedReveal(self.marginal(x, log_x0, step, sites))
        idle = (sites == self.mask_id) | (x != self.mask_id)
        ranking = torch.zeros(*x.shape, 1, dtype=log_x0.dtype, device=x.device).masked_fill(idle.unsqueeze(-1), NEVER)
        return ExtendedReveal(self.marginal(x, log_x0, step, ranking), sites)
