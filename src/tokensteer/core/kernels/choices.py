"""What kernels choose for each particle, to be shared by p and q (`Sites`).

A kernel that only opens sites chooses a boolean tensor (P, L), others a `Remasking` or a `Ranking`. A kernel also
accepts the plain tensor that `as_tensor` makes of its own choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokensteer.core.categorical.sites import SiteDistributions, by_site
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.particles.path import Sites


@dataclass(frozen=True)
class Remasking:
    """The log-probability that each site is masked again, log_p (P, L)."""

    log_p: Tensor

    @classmethod
    def of(cls, sites: Sites) -> Remasking:
        return sites if isinstance(sites, Remasking) else cls(_tensor(sites, "log-probabilities of remasking (P, L)"))

    def __getitem__(self, rows: Tensor) -> Remasking:
        return Remasking(self.log_p[rows])


@dataclass(frozen=True)
class Ranking:
    """The score of each token at each site, log mu^l(token) + lift^l. lift (P, L) is -inf at sites that take no part.

    The table of all scores (P, L, V) is large. It is computed a few rows at a time, always from these two, so that ties
    are the same everywhere.
    """

    laws: SiteDistributions
    lift: Tensor

    @classmethod
    def of(cls, sites: Sites) -> Ranking:
        """A ranking as it is, or one by a table of scores (P, L, V)."""
        if isinstance(sites, Ranking):
            return sites
        what = "scores (P, L, V), -inf at sites that take no part, or a Ranking"
        scores = _tensor(sites, what)
        if scores.dim() != 3 or not scores.is_floating_point():
            kind = str(scores.dtype).removeprefix("torch.")
            raise ValueError(f"tokens are ranked by {what}; got {kind} of shape {tuple(scores.shape)}")
        return cls(by_site(scores), torch.zeros_like(scores[..., 0]).masked_fill(scores[..., 0] == NEVER, NEVER))

    @property
    def candidates(self) -> Tensor:
        """The sites that take part, (P, L)."""
        return self.lift != NEVER

    def __getitem__(self, rows: Tensor) -> Ranking:
        return Ranking(self.laws.take(rows), self.lift[rows])

    def pin(self, fixed: Tensor) -> Ranking:
        return replace(self, lift=self.lift.masked_fill(fixed, NEVER))

    def uses(self, laws: SiteDistributions) -> bool:
        """Whether the scores come from these very distributions."""
        return self.laws.store is laws.store and self.laws.index is laws.index

    def scores(self, log_mu: Tensor | None = None) -> Tensor:
        """All scores, (P, L, V), given the table log_mu (P, L, V) if it is known already."""
        lift = self.lift.unsqueeze(-1)
        log_mu = self.laws.dense() if log_mu is None else log_mu
        return finite(log_mu + lift).masked_fill_(lift == NEVER, NEVER)


def finite(scores: Tensor) -> Tensor:
    """Scores with -inf replaced by the lowest finite number: -inf marks sites that take no part."""
    return scores.clamp(min=torch.finfo(scores.dtype).min)


def open_mask(sites: Sites) -> Tensor:
    return _tensor(sites, "a boolean tensor (P, L), the sites that open")


def as_tensor(sites: Sites) -> Tensor:
    """A choice as a plain tensor, which the kernel that made it also accepts."""
    if isinstance(sites, Ranking):
        return sites.scores()
    return sites.log_p if isinstance(sites, Remasking) else open_mask(sites)


def on_canvas(part: Sites, laws: SiteDistributions, block: slice) -> Sites:
    """A choice among the sites of a block as one among all sites, of which none outside the block is chosen."""

    def widen(values: Tensor, outside: float) -> Tensor:
        canvas = torch.full(laws.index.shape, outside, dtype=values.dtype, device=values.device)
        canvas[:, block] = values
        return canvas

    if isinstance(part, Ranking):
        return Ranking(laws, widen(part.lift, NEVER))
    return Remasking(widen(part.log_p, NEVER)) if isinstance(part, Remasking) else widen(open_mask(part), False)


def _tensor(sites: Sites, what: str) -> Tensor:
    if not isinstance(sites, Tensor):
        raise TypeError(f"sites must be {what}, got {type(sites).__name__}: it was chosen by another kind of kernel")
    return sites
