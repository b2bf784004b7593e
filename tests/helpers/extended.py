"""MaskGIT on the extended state: all sampled tokens are part of the move, and the ratio runs over all masked sites.

The target is that of `MaskGIT`, with weights of larger variance: a check of its marginal weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Generator, Tensor

import tokensteer as ts
from tokensteer.core.categorical.sites import Categoricals
from tokensteer.core.kernels.choices import Ranking
from tokensteer.core.kernels.kernel import PlainKernel
from tokensteer.core.kernels.maskgit import MaskGIT, RankedReveal
from tokensteer.core.kernels.measure import SiteMeasure, Table
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.particles.path import Sites


@dataclass(frozen=True)
class DrawnTokens:
    """The tokens (P, L) that the proposal drew, x where it drew none; p weighs the same tokens."""

    tokens: Tensor

    def __getitem__(self, rows: Tensor) -> DrawnTokens:
        return DrawnTokens(self.tokens[rows])


@dataclass
class ExtendedReveal:
    """`RankedReveal` with all tokens drawn, kept or not, as part of the move.

    log_prob is that of the last draw, over every candidate site; -inf if y is not what was kept of it. It cannot weigh
    a move that it did not draw: no enumeration, no particle Gibbs.
    """

    ranked: RankedReveal
    tokens: Tensor | None = None
    log_mass: None = None
    factorises: ClassVar[bool] = False

    @property
    def sites(self) -> Ranking | DrawnTokens:
        return self.ranked.sites if self.tokens is None else DrawnTokens(self.tokens)

    def sample(self, generator: Generator | None) -> Tensor:
        self.tokens = self.ranked.draw(generator)
        return self.ranked.keep(self.tokens)

    def log_prob(self, y: Tensor) -> Tensor:
        if self.tokens is None:
            raise ValueError(
                "MaskGITExtended only weighs moves that it drew itself. Use MaskGIT, which has the same target"
            )
        log_x0, candidates, dropped = self.ranked.log_x0, self.ranked.candidates, y == self.ranked.mask_id
        mass = log_x0.mass(candidates & dropped)
        log_p = log_x0.entry(self.tokens, candidates) - torch.where(mass == NEVER, 0.0, mass)  # the entry is NEVER too
        right = torch.where(dropped, candidates | (y == self.ranked.x), y == self.tokens).all(-1)
        return log_p.sum(-1).masked_fill(~right, -torch.inf)

    def take(self, rows: Tensor) -> ExtendedReveal:
        return ExtendedReveal(self.ranked.take(rows), None if self.tokens is None else self.tokens[rows])

    def normalise(self) -> ExtendedReveal:
        return replace(self, ranked=self.ranked.normalise())

    def total(self) -> Tensor:
        return self.ranked.total()

    def with_mass(self, log_mass: Tensor | None) -> ExtendedReveal:
        return self

    def tilt(self, h: Categoricals) -> ExtendedReveal:
        return replace(self, ranked=self.ranked.tilt(h))

    def tilt_tokens(self, h: Categoricals) -> ExtendedReveal:
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
class MaskGITExtended(PlainKernel):
    """`MaskGIT` on the extended state. Before a draw `sites` is the ranking, after it the tokens drawn."""

    marginal: MaskGIT

    @property
    def mask_id(self) -> int:
        return self.marginal.mask_id

    def remember(
        self, x: Tensor, before: Tensor | None, log_x0: Categoricals | None, generator: Generator | None
    ) -> Tensor | None:
        return self.marginal.remember(x, before, log_x0, generator)

    def recall(self, x: Tensor, log_x0: Categoricals, step: ts.Step, memory: Tensor) -> Ranking:
        return self.marginal.recall(x, log_x0, step, memory)

    def choose(self, x: Tensor, log_x0: Categoricals, step: ts.Step) -> Ranking:
        return self.marginal.choose(x, log_x0, step)

    def __call__(self, x: Tensor, log_x0: Categoricals, step: ts.Step, sites: Sites | None = None) -> ExtendedReveal:
        if not isinstance(sites, DrawnTokens):
            return ExtendedReveal(self.marginal(x, log_x0, step, sites))
        idle = (sites.tokens == self.mask_id) | (x != self.mask_id)
        ranking = self.choose(x, log_x0, step).pin(idle)
        return ExtendedReveal(self.marginal(x, log_x0, step, ranking), sites.tokens)
