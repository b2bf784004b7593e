"""Token laws that follow a gradient, mu(v) · exp(h(v)) with h = scale · (g(v) - g(here)), clipped, never stored whole.

For networks that expose their embeddings the gradient has low rank: g(v) = a · E_reward[v] + b · E_denoiser[v].
`LowRankGradient` stores a and b per site. `GradientTilt` is h at one step. `GradientTilted` is the tilted distribution;
it multiplies the factors out together with the logits, in a fused kernel on a GPU and a few sites at a time elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tokensteer.core.categorical.forms import (
    Categorical,
    HiddenLogits,
    Logits,
    StoredRows,
    draw_by_parts,
    score_by_parts,
)
from tokensteer.core.categorical.fused import HALF, FusedTilt, TileSums, entries_of, fuses, sum_tiles
from tokensteer.core.categorical.sites import SiteDistributions, lines_of
from tokensteer.core.numerics.draws import WORKING


@dataclass(frozen=True)
class LowRankGradient(StoredRows):
    """Gradients of low rank, g(v) = drawn · rewarded[v] + entered · embedded[v], for K sites.

    drawn (K, D) is the slope in the reward's embedding (V, D) of what is drawn at the site, entered (K, E) that in the
    denoiser's embedding (V, E) of what is read there. Of the mask a token is drawn: `expected` (K,) is its mean worth.
    """

    drawn: Tensor
    rewarded: Tensor
    entered: Tensor
    embedded: Tensor
    expected: Tensor
    mask_id: int
    by_law: ClassVar[tuple[str, ...]] = ("drawn", "entered", "expected")
    normalised: ClassVar[bool] = False

    @property
    def vocab_size(self) -> int:
        return len(self.rewarded)

    @property
    def dtype(self) -> torch.dtype:
        return self.expected.dtype

    @property
    def factors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.drawn, self.rewarded, self.entered, self.embedded

    def rows(self, index: Tensor) -> Tensor:
        g = self._exact(self.drawn[index]) @ self._exact(self.rewarded).T
        g[:, self.mask_id] = self.expected[index]
        return g.addmm_(self._exact(self.entered[index]), self._exact(self.embedded).T)

    def entries(self, index: Tensor, tokens: Tensor) -> Tensor:
        if fuses(*self.factors) and self.dtype == torch.float32:
            return entries_of(*self.factors, self.expected, index, tokens, self.mask_id)
        few = max(1, WORKING // (16 * max(self.drawn.shape[1], self.entered.shape[1])))
        parts = zip(torch.split(index, few), torch.split(tokens, few), strict=True)
        return torch.cat([self._entries(*part) for part in parts])

    def _entries(self, index: Tensor, tokens: Tensor) -> Tensor:
        drawn = (self._exact(self.drawn[index]) * self._exact(self.rewarded[tokens])).sum(-1)
        entered = (self._exact(self.entered[index]) * self._exact(self.embedded[tokens])).sum(-1)
        return torch.where(tokens == self.mask_id, self.expected[index], drawn) + entered

    def _exact(self, values: Tensor) -> Tensor:
        return values.to(self.dtype)

    def draw(self, index: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return draw_by_parts(self.rows, self.vocab_size, index, u)


@dataclass(frozen=True)
class GradientTilt:
    """h = scale · (g - here) within ± clip, for K sites: `site`, scale and here are (K,), g the slopes of `site`, and
    here what they are at the token that is there, so that h is 0 there. `masked_only`: no open site has any."""

    slopes: Categorical
    site: Tensor
    scale: Tensor
    here: Tensor
    clip: float
    masked_only: bool = False
    normalised: ClassVar[bool] = False

    @property
    def vocab_size(self) -> int:
        return self.slopes.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        return self.slopes.dtype

    def rows(self, index: Tensor) -> Tensor:
        scale, here = self.scale[index].unsqueeze(-1), self.here[index].unsqueeze(-1)
        return self.slopes.rows(self.site[index]).sub_(here).mul_(scale).clamp_(-self.clip, self.clip)

    def entries(self, index: Tensor, tokens: Tensor) -> Tensor:
        g = self.slopes.entries(self.site[index], tokens)
        return (g - self.here[index]).mul_(self.scale[index]).clamp_(-self.clip, self.clip)

    def draw(self, index: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return draw_by_parts(self.rows, self.vocab_size, index, u)

    def at(self, index: Tensor) -> FusedTilt | None:
        """As the kernels want it, for the lines `index` (k,), any where it is -1; None if it is not for them."""
        g = self.slopes
        if not isinstance(g, LowRankGradient) or not fuses(*g.factors):
            return None
        lines = index.clamp(min=0)
        return FusedTilt(*g.factors, self.site[lines], self.scale[lines].float(), self.here[lines].float(), self.clip)


@dataclass(frozen=True)
class GradientTilted:
    """The laws ∝ mu · exp(h), normalised, for K sites: mu is the law `site` (K,), h the bend `line` (K,), -1 for none.

    On a GPU they are `weighed` once, for all that is asked of them.
    """

    law: Logits | HiddenLogits
    site: Tensor
    gradient_tilt: GradientTilt
    line: Tensor
    weighed: TileSums | None
    normalised: ClassVar[bool] = True

    @property
    def vocab_size(self) -> int:
        return self.law.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        return self.law.dtype

    def rows(self, index: Tensor) -> Tensor:
        return self._spelt(index).log_softmax(-1)

    @torch.no_grad()
    def _spelt(self, index: Tensor) -> Tensor:
        return self.law.rows(self.site[index]).add_(self.gradient_tilt.rows(self.line[index]))

    def entries(self, index: Tensor, tokens: Tensor) -> Tensor:
        return self.law.entries(self.site[index], tokens) + self.log_bend(index, tokens)

    def draw(self, index: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        if self.weighed is not None:
            return self.weighed.draw(index, u)
        return draw_by_parts(self._spelt, self.vocab_size, index, u)

    def log_bend(self, index: Tensor, tokens: Tensor) -> Tensor:
        """By how much tokens (k,) are likelier than under mu, as a log; anything where the index is -1."""
        return self.gradient_tilt.entries(self.line[index], tokens) - self.gain(index)

    def gain(self, index: Tensor) -> Tensor:
        """log sum_v mu(v) · exp(h(v)), (k,); anything where the index is -1."""
        if self.weighed is not None:
            return self.weighed.gain[index].to(self.dtype)
        return score_by_parts(lambda part: self._spelt(part).logsumexp(-1), self.vocab_size, index).to(self.dtype)


def bent(law: Logits | HiddenLogits, site: Tensor, h: GradientTilt, line: Tensor) -> GradientTilted:
    """The laws `site` (K,) bent by the lines of h (K,), -1 where none is read."""
    x, weight, bias = (
        (law.values, None, None) if isinstance(law, Logits) else (law.states, law.head.weight, law.head.bias)
    )
    bend = h.at(line) if x.dtype in HALF else None
    weighed = None if bend is None else sum_tiles(x, weight, bias, torch.where(line < 0, -1, site), law.mask_id, bend)
    return GradientTilted(law, site, h, line, weighed)


def gradient_tilt(
    slopes: SiteDistributions, where: Tensor, scale: Tensor, x: Tensor, clip: float | None, masked_only: bool = False
) -> SiteDistributions:
    """h at the sites `where` of x (P, L), from slopes and their scale (P, L)."""
    here = slopes.entry(x, where)
    most = math.inf if clip is None else clip
    store = GradientTilt(
        slopes.store, slopes.index.flatten(), scale.to(here).flatten(), here.flatten(), most, masked_only
    )
    return SiteDistributions(store, lines_of(where))


def outcomes(h: SiteDistributions, x: Tensor, mask_id: int) -> tuple[Tensor | float, Tensor | float]:
    """h of every site as it is in x (P, L), and of the mask where a site is open; (P, L), or 0.0 for nothing."""
    if isinstance(h.store, GradientTilt) and h.store.masked_only:
        return 0.0, 0.0
    masked = x == mask_id
    stay = 0.0 if isinstance(h.store, GradientTilt) else h.entry(x, torch.ones_like(masked))
    return stay, h.entry(torch.full_like(x, mask_id), ~masked)


def bend(laws: SiteDistributions, h: SiteDistributions, where: Tensor) -> tuple[SiteDistributions, Tensor] | None:
    """The laws ∝ mu · exp(h) at the sites `where`, and the log of the mass that mu · exp(h) has there, 0 elsewhere,
    (P, L). None if there is a way to no mass at all: only softmaxes with finite bends are sure to have some."""
    if not isinstance(laws.store, Logits | HiddenLogits) or not isinstance(h.store, GradientTilt):
        return None
    law = bent(laws.store, laws.index.flatten(), h.store, torch.where(where, h.index, -1).flatten())
    tokens = SiteDistributions(law, lines_of(where))
    return tokens, tokens.read(law.gain, where)


def log_bend(q: SiteDistributions, p: SiteDistributions, y: Tensor, where: Tensor) -> Tensor | None:
    """log q(y) - log p(y) of the tokens y (P, L) at the sites `where`, 0 elsewhere, if q is p bent: what bent it says
    it all, and p is not read."""
    bent = q.store if isinstance(q.store, GradientTilted) and q.store.law is p.store else None
    return None if bent is None else q.score(bent.log_bend, y, where)
