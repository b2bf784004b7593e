"""Distributions tilted by a gradient: mu(v) · exp(h(v)) with h = scale · (g(v) - g(here)), clipped, never stored whole.

For networks that expose their embeddings the gradient has low rank: g(v) = a · E_reward[v] + b · E_denoiser[v].
`LowRankGradient` stores a and b per site. `GradientTilt` is h at one step. `GradientTilted` is the tilted distribution;
it multiplies the factors out together with the logits, in a fused kernel on a GPU and a few sites at a time elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from tokensteer.core.categorical.forms import CategoricalStore, Derived, DrawnByRows, Softmax, score_by_parts
from tokensteer.core.categorical.fused import HALF, FusedTilt, TileSums, fuses, sum_tiles
from tokensteer.core.categorical.sites import SiteDistributions, line_index
from tokensteer.core.categorical.triton_kernels import kernels, programs
from tokensteer.core.numerics.draws import NEVER, WORKING


@dataclass(frozen=True)
class LowRankGradient(DrawnByRows, CategoricalStore):
    """Gradients of low rank, g(v) = drawn · rewarded[v] + entered · embedded[v], for K sites.

    drawn (K, D) is the gradient in the reward's embedding (V, D) of the token drawn at the site, entered (K, E) that in
    the denoiser's embedding (V, E) of the token read there. At a mask a token is drawn, so its first term is `expected`
    (K,), the mean of drawn · rewarded.
    """

    drawn: Tensor
    rewarded: Tensor
    entered: Tensor
    embedded: Tensor
    expected: Tensor
    mask_id: int
    normalised: ClassVar[bool] = False

    def lines(self) -> tuple[Tensor, ...]:
        return self.drawn, self.entered, self.expected

    def with_lines(self, *lines: Tensor) -> Self:
        drawn, entered, expected = lines
        return replace(self, drawn=drawn, entered=entered, expected=expected)

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
            return self._fused_entries(index, tokens)
        few = max(1, WORKING // (16 * max(self.drawn.shape[1], self.entered.shape[1])))
        parts = zip(torch.split(index, few), torch.split(tokens, few), strict=True)
        return torch.cat([self._entries(*part) for part in parts])

    def _entries(self, index: Tensor, tokens: Tensor) -> Tensor:
        drawn = (self._exact(self.drawn[index]) * self._exact(self.rewarded[tokens])).sum(-1)
        entered = (self._exact(self.entered[index]) * self._exact(self.embedded[tokens])).sum(-1)
        return torch.where(tokens == self.mask_id, self.expected[index], drawn) + entered

    def _fused_entries(self, index: Tensor, tokens: Tensor) -> Tensor:
        """`_entries` on a GPU, without copies of the factors."""
        tensors = tuple(tensor.contiguous() for tensor in (*self.factors, self.expected, index, tokens))
        answers = torch.empty(len(index), dtype=torch.float32, device=index.device)
        sizes = (self.drawn.shape[1], self.entered.shape[1])
        if len(index):
            wide = 1 << (max(sizes) - 1).bit_length()
            warps = max(1, min(4, wide // 256))
            with torch.cuda.device(index.device):
                programs().dots[(len(index),)](*tensors, answers, self.mask_id, *sizes, wide, num_warps=warps)
        return answers

    def _exact(self, values: Tensor) -> Tensor:
        return values.to(self.dtype)


@dataclass(frozen=True)
class GradientTilt(Derived):
    """h = scale · (g - here), clipped to ± clip, for K sites. g is line `site` (K,) of `base`; scale and `here`, the
    gradient at the current token, are (K,). `masked_only`: h is not defined at open sites."""

    site: Tensor
    scale: Tensor
    here: Tensor
    clip: float
    masked_only: bool = False
    normalised: ClassVar[bool] = False

    def rows(self, index: Tensor) -> Tensor:
        scale, here = self.scale[index].unsqueeze(-1), self.here[index].unsqueeze(-1)
        return self.base.rows(self.site[index]).sub_(here).mul_(scale).clamp_(-self.clip, self.clip)

    def entries(self, index: Tensor, tokens: Tensor) -> Tensor:
        g = self.base.entries(self.site[index], tokens)
        return (g - self.here[index]).mul_(self.scale[index]).clamp_(-self.clip, self.clip)

    def fused(self, index: Tensor) -> FusedTilt | None:
        """The arguments of the fused kernels for the lines `index` (k,), arbitrary at -1; None if they cannot run."""
        g = self.base
        if not isinstance(g, LowRankGradient) or not fuses(*g.factors):
            return None
        lines = index.clamp(min=0)
        return FusedTilt(*g.factors, self.site[lines], self.scale[lines].float(), self.here[lines].float(), self.clip)


@dataclass(frozen=True)
class GradientTilted(Derived):
    """Distributions ∝ mu · exp(h) for K sites: mu is line `site` (K,) of `base`, h line `line` (K,) of `gradient_tilt`,
    -1 for none. On a GPU `sums` holds their sums over blocks of the vocabulary, which all methods use."""

    base: Softmax
    site: Tensor
    gradient_tilt: GradientTilt
    line: Tensor
    sums: TileSums | None
    normalised: ClassVar[bool] = True

    @classmethod
    def make(cls, base: Softmax, site: Tensor, h: GradientTilt, line: Tensor) -> GradientTilted:
        """With the sums, if the fused kernels can run."""
        tilt = h.fused(line) if base.lines()[0].dtype in HALF else None
        sums = None if tilt is None else sum_tiles(base.at(torch.where(line < 0, -1, site)), tilt)
        return cls(base, site, h, line, sums)

    def rows(self, index: Tensor) -> Tensor:
        return self.masses(index).log_softmax(-1)

    @torch.no_grad()
    def masses(self, index: Tensor) -> Tensor:
        return self.base.rows(self.site[index]).add_(self.gradient_tilt.rows(self.line[index]))

    def entries(self, index: Tensor, tokens: Tensor) -> Tensor:
        return self.base.entries(self.site[index], tokens) + self.log_ratio(index, tokens)

    def draw(self, index: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return super().draw(index, u) if self.sums is None else self.sums.draw(index, u)

    def log_ratio(self, index: Tensor, tokens: Tensor) -> Tensor:
        """The log-probability of tokens (k,) minus that under mu; arbitrary where the index is -1."""
        return self.gradient_tilt.entries(self.line[index], tokens) - self.gain(index)

    def gain(self, index: Tensor) -> Tensor:
        """log sum_v mu(v) · exp(h(v)), (k,); arbitrary where the index is -1."""
        if self.sums is not None:
            return self.sums.gain[index].to(self.dtype)
        return score_by_parts(lambda part: self.masses(part).logsumexp(-1), self.vocab_size, index).to(self.dtype)


def softmax_slope(logits: Tensor, worth: Tensor, vocab_size: int, mask: int) -> tuple[Tensor, Tensor]:
    """The gradient mu · (worth - <mu, worth>) of <mu, worth> in the logits, and <mu, worth>.

    mu = softmax(logits) without the mask. Both tables are (k, V) or wider; columns beyond the vocabulary are not read.
    Both may be overwritten. The means (k,) are in float32 or wider.
    """
    half = logits.is_cuda and logits.dtype in HALF and worth.dtype in HALF
    if half and kernels() is not None and logits.stride(1) == worth.stride(1) == 1:
        means = logits.new_empty(len(logits), dtype=torch.float32)
        if len(logits):
            strides = logits.stride(0), worth.stride(0)
            with torch.cuda.device(logits.device):
                programs().jacobian[(len(logits),)](logits, worth, means, vocab_size, *strides, mask, 2048, num_warps=4)
        return logits, means
    inside = logits[:, :vocab_size]
    if 0 <= mask < vocab_size:
        inside[:, mask] = NEVER
    mu = inside.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    worth = worth[:, :vocab_size].to(mu.dtype)
    means = (mu * worth).sum(-1)
    inside.copy_(mu.mul_(worth.sub_(means.unsqueeze(-1))))
    return logits, means


def gradient_tilt(
    slopes: SiteDistributions, where: Tensor, scale: Tensor, x: Tensor, clip: float | None, masked_only: bool = False
) -> SiteDistributions:
    """h at the sites `where` of x (P, L), from gradients and their scale (P, L)."""
    here = slopes.entry(x, where)
    most = math.inf if clip is None else clip
    site, scale = slopes.index.flatten(), scale.to(here).flatten()
    return SiteDistributions(
        GradientTilt(slopes.store, site, scale, here.flatten(), most, masked_only), line_index(where)
    )


def tilts_of_outcomes(h: SiteDistributions, x: Tensor, mask_id: int) -> tuple[Tensor | float, Tensor | float]:
    """h of staying, that is at the current token, and of remasking an open site: (P, L), or 0.0 if it is 0 anyway."""
    if isinstance(h.store, GradientTilt) and h.store.masked_only:
        return 0.0, 0.0
    masked = x == mask_id
    stay = 0.0 if isinstance(h.store, GradientTilt) else h.entry(x, torch.ones_like(masked))
    return stay, h.entry(torch.full_like(x, mask_id), ~masked)


def tilt_by_gradient(
    laws: SiteDistributions, h: SiteDistributions, where: Tensor
) -> tuple[SiteDistributions, Tensor] | None:
    """The distributions ∝ mu · exp(h) at the sites `where`, and the log-mass of mu · exp(h) there, 0 elsewhere, (P, L).

    None unless mu is a softmax and h a `GradientTilt`: other forms may have no mass at all."""
    if not isinstance(laws.store, Softmax) or not isinstance(h.store, GradientTilt):
        return None
    line = torch.where(where, h.index, -1).flatten()
    law = GradientTilted.make(laws.store, laws.index.flatten(), h.store, line)
    tokens = SiteDistributions(law, line_index(where))
    return tokens, tokens.read(law.gain, where)


def log_gradient_ratio(q: SiteDistributions, p: SiteDistributions, y: Tensor, where: Tensor) -> Tensor | None:
    """log q(y) - log p(y) of the tokens y (P, L) at the sites `where`, 0 elsewhere, without reading p; None unless q is
    p tilted by a gradient."""
    tilted = q.store if isinstance(q.store, GradientTilted) and q.store.base is p.store else None
    return None if tilted is None else q.score(tilted.log_ratio, y, where)
