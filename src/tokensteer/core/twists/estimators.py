"""Estimates: what a half-finished sequence will be worth.

An estimate is a weighted set of clean sequences drawn from, or listing, p(x_0 | x_t), and an average of their rewards.
Its gradient in x_t comes from automatic differentiation in two ways: through the reward, if it is differentiable and
the sequences are relaxed one-hots; or through the weights, whose logs carry log p(x_0 | x_t), which is REINFORCE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from tokensteer.core.categorical.forms import rows_at_once
from tokensteer.core.categorical.sites import Categoricals, SiteDistributions, as_table, by_site
from tokensteer.core.kernels.kernel import NO_MASK
from tokensteer.core.models.denoiser import carry_over
from tokensteer.core.numerics.domains import check_number, check_whole
from tokensteer.core.numerics.draws import NEVER, replace_neg_inf, shared_uniforms, spread_uniforms, uniforms_at
from tokensteer.core.numerics.rows import distinct, support

Average = Callable[[Tensor, Tensor, float], Tensor]


class NoisyState(NamedTuple):
    """What an estimate may see: x_t as ids (P, L), or as one-hots (P, L, V) when gradients are wanted.

    `noise` (P, L, M), where it was drawn ahead, holds a uniform on (0, 1] for each draw of each hidden site.
    """

    x: Tensor
    log_x0: Categoricals
    t: float
    mask_id: int
    noise: Tensor | None = None

    @property
    def relaxed(self) -> bool:
        return self.x.is_floating_point()

    @property
    def tokens(self) -> SiteDistributions:
        return by_site(self.log_x0)

    @property
    def ids(self) -> Tensor:
        return self.x.argmax(-1) if self.relaxed else self.x

    @property
    def one_hots(self) -> Tensor:
        return self.x if self.relaxed else one_hot(self.x, self.tokens.vocab_size).to(self.log_x0.dtype)

    @property
    def hidden(self) -> Tensor:
        """The sites whose clean token is not seen in x_t, (P, L)."""
        return hidden_sites(self.ids, self.mask_id)

    def clean_law(self) -> Tensor:
        """p(x_0 | x_t) with what is visible carried over, (P, L, V), differentiable in x."""
        log_x0 = as_table(self.log_x0)
        return log_x0.exp() if self.mask_id == NO_MASK else carry_over(self.one_hots, log_x0, self.mask_id)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=self.log_x0.dtype, device=self.x.device)

    def take(self, rows: Tensor) -> NoisyState:
        noise = None if self.noise is None else self.noise[rows]
        return self._replace(x=self.x[rows], log_x0=self.tokens.take(rows), noise=noise)


def hidden_sites(ids: Tensor, mask_id: int) -> Tensor:
    """The sites of x_t (P, L) that a clean sequence is drawn at, (P, L): the masked ones, all without a mask."""
    return torch.ones_like(ids, dtype=torch.bool) if mask_id == NO_MASK else ids == mask_id


class Rewarding(Protocol):
    """What an estimate asks of its tilt."""

    @property
    def kl(self) -> float: ...
    @property
    def draws(self) -> int: ...
    @property
    def average(self) -> Average: ...
    @property
    def differentiable(self) -> bool: ...
    def exact(self, x0: Tensor) -> Tensor:
        """The reward of clean sequences, (P,)."""
        ...


# ---- averages of rewards r (K, P) with log-weights log_v (K, P); equal rewards come out bit for bit


def log_mean_exp(r: Tensor, log_v: Tensor, kl: float) -> Tensor:
    """kl · log E[exp(r/kl)], the scale inside: the soft value of one-shot denoising."""
    v, centre = _weights_and_centre(r, log_v)
    mean = (v * ((r - centre) / kl).exp()).sum(0) / v.detach().sum(0)
    if not mean.requires_grad:
        return centre + kl * mean.log()
    nothing = mean == 0  # whose gradient would be NaN; and not NaN, which goes on to the weights and is found there
    return torch.where(nothing, NEVER, centre + kl * torch.where(nothing, 1.0, mean).log())


def log_mean_exp_outside(r: Tensor, log_v: Tensor, kl: float) -> Tensor:
    """log E[exp(r)], the scale outside, as the paper prints it: another twist, the same target."""
    return log_mean_exp(r, log_v, 1.0)


def mean(r: Tensor, log_v: Tensor, kl: float) -> Tensor:
    """E[r]."""
    v, centre = _weights_and_centre(r, log_v)
    total = v.detach().sum(0)
    # -inf is kept out of the graph, where its gradient would be NaN, and put in again at the end.
    spread = torch.where(r == NEVER, 0.0, r - centre)
    average = (v * spread).sum(0) / total + centre * (v.sum(0) / total)
    return torch.where(((r == NEVER) & (v > 0)).any(0), NEVER, average)


def _weights_and_centre(r: Tensor, log_v: Tensor) -> tuple[Tensor, Tensor]:
    """v, and the largest reward as a constant, 0 where there is none. Only the numerator's weights carry a gradient:
    that makes the gradient through them the REINFORCE estimator."""
    centre = r.detach().masked_fill(log_v == NEVER, NEVER).amax(0)
    return log_v.exp(), replace_neg_inf(centre, 0.0)


# ---- estimators


def _average_draws(tilt: Rewarding, clean: Tensor, log_v: Tensor) -> Tensor:
    """The average reward of M weighted sequences a row: clean (M, P, ...), log_v (M, P)."""
    return tilt.average(tilt.exact(clean.flatten(0, 1)).view_as(log_v), log_v, tilt.kl)


def _score(look: NoisyState, x0: Tensor) -> Tensor:
    """log p(x_0 | x_t) over the masked sites of x_t, differentiable in x_t; x0 (M, P, L), the score (M, P).

    Gathering from an expanded tensor keeps the gradient's sums in a fixed order, so that a seed gives the same run.
    """
    law = look.clean_law() if look.relaxed else as_table(look.log_x0).exp()
    mu = law.expand(len(x0), *law.shape).gather(-1, x0.unsqueeze(-1)).squeeze(-1)
    # Sites that are seen do not count; a 1 there, since the gradient of log 0 would be NaN.
    return torch.where(look.hidden, mu, 1.0).log().sum(-1)


def gumbel_softmax(look: NoisyState, noise: Tensor, temperature: float) -> Tensor:
    """softmax((log mu + noise)/temperature) at the K hidden sites, noise (M, K, V): the softmaxes (M, K, V)."""
    mu = look.clean_law()[look.hidden]
    log_mu = torch.where(mu > 0, mu, 1.0).log().masked_fill(mu == 0, NEVER)
    return ((log_mu + noise) / temperature).softmax(-1)


def _gumbel(look: NoisyState, draws: int, generator: Generator | None) -> Tensor:
    """Gumbel noise for the K hidden sites, (draws, K, V), from one uniform for each site and draw."""
    hidden = look.hidden
    seeds = (uniforms_at(hidden, draws, generator) if look.noise is None else look.noise)[hidden].T
    exponential = spread_uniforms(seeds, look.tokens.vocab_size).log_().neg_()
    return exponential.clamp_(min=torch.finfo(torch.float64).tiny).log_().neg_().to(look.log_x0.dtype)


def _completed(look: NoisyState, drawn: Tensor) -> Tensor:
    """Clean sequences (M, P, L, V): what is drawn (M, K, V) at the hidden sites, carry-over elsewhere."""
    seen = look.clean_law()
    row, site = look.hidden.nonzero(as_tuple=True)
    draw = torch.arange(len(drawn), device=row.device).unsqueeze(-1)
    return seen.repeat(len(drawn), 1, 1, 1).index_put((draw, row, site), drawn)


def _straight_through(soft: Tensor) -> Tensor:
    """The corner of the simplex nearest to each softmax, with the gradient of the softmax."""
    hard = torch.zeros_like(soft).scatter_(-1, soft.detach().argmax(-1, keepdim=True), 1.0)
    return hard + (soft - soft.detach())


def draw_clean(look: NoisyState, draws: int, generator: Generator | None, shared: Tensor | None = None) -> Tensor:
    """M clean sequences for each row from one pass over their laws, drawn at masked sites only, (M, P, L) ids; perhaps
    from uniforms that are `shared` by all rows, (L, M)."""
    hidden = look.hidden
    noise = look.noise if shared is None else shared
    return torch.where(hidden, look.tokens.draw(hidden, draws, generator, noise)[0], look.ids)


@dataclass(frozen=True)
class Sampled:
    """Draws from p(x_0 | x_t). If the reward is differentiable, each has the gradient of the law it was drawn from
    (straight through); if not, gradients are by REINFORCE.

    With a `seed` the noise behind the draws is the same for all particles at all times. The estimate is then a function
    of x_t, one of many that would do, and weights are differences of one function instead of two noises."""

    seed: int | None = None
    ignores_time: bool = field(default=True, init=False, repr=False)
    drawn: bool = field(default=True, init=False, repr=False)
    _shared: dict[Any, Tensor] = field(default_factory=dict[Any, Tensor], init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.seed is not None:
            check_whole("Sampled.seed", self.seed, 0)

    @property
    def random(self) -> bool:
        return self.seed is None

    def with_draws(self, draws: int) -> Sampled:
        return self

    def clean(self, tilt: Rewarding, look: NoisyState, generator: Generator | None) -> Tensor:
        """The draws, (M, P, L) ids."""
        return draw_clean(look, tilt.draws, generator, self._noise(tilt.draws, look.ids.shape[1], look.x.device))

    def _noise(self, draws: int, length: int, device: torch.device) -> Tensor | None:
        """The noise that the seed stands for, made once and kept for as long as anyone may draw from it."""
        if self.seed is None:
            return None
        kind = draws, length, device
        if kind not in self._shared:
            self._shared[kind] = shared_uniforms(self.seed, draws, length, device).T
        return self._shared[kind]

    def __call__(self, tilt: Rewarding, look: NoisyState, generator: Generator | None) -> Tensor:
        x0, log_v = self.clean(tilt, look, generator), look.zeros(tilt.draws, len(look.x))
        if look.relaxed and tilt.differentiable:
            law = look.clean_law()
            return _average_draws(tilt, one_hot(x0, law.shape[-1]).to(law.dtype) + (law - law.detach()), log_v)
        if look.relaxed:
            score = _score(look, x0)
            log_v = log_v + (score - score.detach())
        return _average_draws(tilt, x0, log_v)


@dataclass(frozen=True)
class Relaxed:
    """Gumbel-softmax draws, between the corners of the simplex; for differentiable rewards. With `hard` the reward is
    that of the nearest corner, an exact draw, and the gradient goes straight through, as in the paper: noisier than
    `Sampled`, and dearer."""

    temperature: float = 1.0
    hard: bool = False
    random: bool = field(default=True, init=False, repr=False)
    ignores_time: bool = field(default=True, init=False, repr=False)
    drawn: bool = field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        check_number("Relaxed.temperature", self.temperature, "(0, inf)")

    def with_draws(self, draws: int) -> Relaxed:
        return self

    def __call__(self, tilt: Rewarding, look: NoisyState, generator: Generator | None) -> Tensor:
        soft = gumbel_softmax(look, _gumbel(look, tilt.draws, generator), self.temperature)
        drawn = _straight_through(soft) if self.hard else soft
        return _average_draws(tilt, _completed(look, drawn), look.zeros(tilt.draws, len(look.x)))


@dataclass(frozen=True)
class SoftInput:
    """r(mu(x_t)): the reward of the posterior mean; for differentiable rewards."""

    random: bool = field(default=False, init=False, repr=False)
    ignores_time: bool = field(default=True, init=False, repr=False)

    def __call__(self, tilt: Rewarding, look: NoisyState, generator: Generator | None) -> Tensor:
        if look.relaxed or not len(look.x):
            return tilt.exact(look.clean_law())
        # Laws of whole rows are large: as many at once as may be spelt out.
        at_once = max(1, rows_at_once(look.tokens.vocab_size) // look.x.shape[1])
        parts = torch.split(torch.arange(len(look.x), device=look.x.device), at_once)
        return torch.cat([tilt.exact(look.take(rows).clean_law()) for rows in parts])


@dataclass(frozen=True)
class Exact:
    """The expectation over all completions, by enumeration; for few open sites or a small vocabulary."""

    limit: int = 1_000_000
    random: bool = field(default=False, init=False, repr=False)
    ignores_time: bool = field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        check_whole("Exact.limit", self.limit)

    def __call__(self, tilt: Rewarding, look: NoisyState, generator: Generator | None) -> Tensor:
        if look.relaxed:  # with gradients each needs its own
            return self._estimate(tilt, look)
        first, row = distinct(look.tokens.index[:, :1])  # who share their laws are twins
        return self._estimate(tilt, look.take(first))[row]

    def _estimate(self, tilt: Rewarding, look: NoisyState) -> Tensor:
        row, x0 = support(look.clean_law().detach().log(), self.limit)
        rank = torch.arange(len(row), device=row.device) - torch.searchsorted(row, row)
        # The rank-th completion of each row side by side. Where a row has no more of them its first stands in, of
        # weight 0: any other might have no mass, and the gradient of log 0 would be NaN.
        size, place = (int(rank.max()) + 1, len(look.x)), (rank, row)
        taken = torch.zeros(size, dtype=torch.bool, device=row.device).index_put(place, rank >= 0)
        first = x0[torch.searchsorted(row, torch.arange(len(look.x), device=row.device)).clamp(max=len(x0) - 1)]
        score = _score(look, first.repeat(size[0], 1, 1).index_put(place, x0))
        r = tilt.exact(x0)
        rewards = r.new_full(size, NEVER).index_put(place, r)
        return tilt.average(rewards, torch.where(taken, score, NEVER), tilt.kl)


@dataclass(frozen=True)
class Value:
    """Any function r_hat(x, t) of the noisy sequence, learned or known; x as ids, or one-hots for gradients. If it
    `ignores_time`, a particle that has not moved keeps its value."""

    function: Callable[[Tensor, float], Tensor]
    ignores_time: bool = False
    random: bool = field(default=False, init=False, repr=False)

    def __call__(self, tilt: Rewarding, look: NoisyState, generator: Generator | None) -> Tensor:
        return self.function(look.x, look.t)
