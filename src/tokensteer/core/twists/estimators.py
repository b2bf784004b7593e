"""Estimators of the reward at x_t. Sources are in docs/references.md.

An estimate is an average of rewards over weighted clean sequences, drawn from p(x_0 | x_t) or enumerated. Its gradient
in x_t is taken through the reward if that is differentiable, with one-hots that are relaxed or straight-through (Bengio
et al., 2013); else through the log-weights, which contain log p(x_0 | x_t): REINFORCE (Williams, 1992).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from tokensteer.core.categorical.forms import rows_at_once
from tokensteer.core.categorical.sites import Categoricals, SiteDistributions, as_table, by_site
from tokensteer.core.kernels.kernel import NO_MASK
from tokensteer.core.models.denoiser import carry_over
from tokensteer.core.numerics.domains import check_callable, check_flags, check_number, check_whole
from tokensteer.core.numerics.draws import NEVER, replace_neg_inf, shared_uniforms, spread_uniforms, uniforms_at
from tokensteer.core.numerics.rows import distinct, support

if TYPE_CHECKING:
    from tokensteer.core.twists.tilt import Tilt

Average = Callable[[Tensor, Tensor, float], Tensor]
"""(rewards of draws (M, P), their log-weights (M, P), kl) -> the estimate (P,)."""


class NoisyState(NamedTuple):
    """The input of an estimator: x_t as ids (P, L), or as one-hots (P, L, V) for gradients, and the prediction there.

    `noise` (P, L, M), if drawn beforehand, holds a uniform on (0, 1] for each draw of each hidden site. `of` (P,) is
    the population of each row, where the context of the reward differs between populations.
    """

    x: Tensor
    log_x0: Categoricals
    t: float
    mask_id: int
    noise: Tensor | None = None
    of: Tensor | None = None

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
        """The sites whose clean token is not visible in x_t, (P, L)."""
        return hidden_sites(self.ids, self.mask_id)

    def clean_probs(self) -> Tensor:
        """p(x_0 | x_t) with visible tokens carried over, (P, L, V), differentiable in x."""
        log_x0 = as_table(self.log_x0)
        return log_x0.exp() if self.mask_id == NO_MASK else carry_over(self.one_hots, log_x0, self.mask_id)

    def take(self, rows: Tensor) -> NoisyState:
        noise, of = (None if part is None else part[rows] for part in (self.noise, self.of))
        return self._replace(x=self.x[rows], log_x0=self.tokens.take(rows), noise=noise, of=of)


def hidden_sites(ids: Tensor, mask_id: int) -> Tensor:
    """The sites where clean tokens are drawn, (P, L): the masked ones, or all if there is no mask."""
    return torch.ones_like(ids, dtype=torch.bool) if mask_id == NO_MASK else ids == mask_id


# ---- averages of rewards r (K, P) with log-weights log_v (K, P); equal rewards come out bit for bit


def log_mean_exp(r: Tensor, log_v: Tensor, kl: float) -> Tensor:
    """kl · log E[exp(r/kl)]: the soft value of one-shot denoising."""
    v, centre = _weights_and_centre(r, log_v)
    mean = (v * ((r - centre) / kl).exp()).sum(0) / v.detach().sum(0)
    if not mean.requires_grad:
        return centre + kl * mean.log()
    nothing = mean == 0  # its gradient would be NaN; NaN itself passes on to the weights and raises there
    return torch.where(nothing, NEVER, centre + kl * torch.where(nothing, 1.0, mean).log())


def log_mean_exp_outside(r: Tensor, log_v: Tensor, kl: float) -> Tensor:
    """log E[exp(r)], with the scale outside (Ou et al., 2026): another twist for the same target."""
    return log_mean_exp(r, log_v, 1.0)


def mean(r: Tensor, log_v: Tensor, kl: float) -> Tensor:
    """E[r]."""
    v, centre = _weights_and_centre(r, log_v)
    total = v.detach().sum(0)
    # -inf is kept out of the graph, where its gradient would be NaN, and restored at the end.
    spread = torch.where(r == NEVER, 0.0, r - centre)
    average = (v * spread).sum(0) / total + centre * (v.sum(0) / total)
    return torch.where(((r == NEVER) & (v > 0)).any(0), NEVER, average)


def _weights_and_centre(r: Tensor, log_v: Tensor) -> tuple[Tensor, Tensor]:
    """v, and the largest reward as a constant, 0 if it is -inf. Callers detach v in denominators, which makes the
    gradient through the weights the REINFORCE estimator."""
    centre = r.detach().masked_fill(log_v == NEVER, NEVER).amax(0)
    return log_v.exp(), replace_neg_inf(centre, 0.0)


# ---- estimators


def _average_draws(tilt: Tilt, state: NoisyState, clean: Tensor, score: Tensor | None = None) -> Tensor:
    """The average reward (P,) of draws (M, P, ...) of equal weight, whose logs have the gradient of `score` (M, P)."""
    log_v = torch.zeros(clean.shape[:2], dtype=state.log_x0.dtype, device=clean.device)
    log_v = log_v if score is None else log_v + (score - score.detach())
    of = None if state.of is None else state.of.repeat(len(clean))
    return tilt.averaged(tilt.exact(clean.flatten(0, 1), of).view_as(log_v), log_v)


def _score(state: NoisyState, x0: Tensor) -> Tensor:
    """log p(x_0 | x_t) over the masked sites of x_t, differentiable in x_t; x0 (M, P, L), the score (M, P).

    Gathering from an expanded tensor keeps the gradient's sums in a fixed order, so that seeds are reproducible.
    """
    probs = state.clean_probs() if state.relaxed else as_table(state.log_x0).exp()
    mu = probs.expand(len(x0), *probs.shape).gather(-1, x0.unsqueeze(-1)).squeeze(-1)
    # Visible sites do not count; 1 there, since the gradient of log 0 would be NaN.
    return torch.where(state.hidden, mu, 1.0).log().sum(-1)


def _gumbel(state: NoisyState, draws: int, generator: Generator | None) -> Tensor:
    """Gumbel noise for the K hidden sites, (draws, K, V), from one uniform for each site and draw."""
    hidden = state.hidden
    seeds = (uniforms_at(hidden, draws, generator) if state.noise is None else state.noise)[hidden].T
    exponential = spread_uniforms(seeds, state.tokens.vocab_size).log_().neg_()
    return exponential.clamp_(min=torch.finfo(torch.float64).tiny).log_().neg_().to(state.log_x0.dtype)


def draw_clean(state: NoisyState, draws: int, generator: Generator | None, shared: Tensor | None = None) -> Tensor:
    """M clean sequences for each row, (M, P, L) ids, drawn at hidden sites in one pass over their distributions; from
    the uniforms `shared` (L, M) by all rows, if given."""
    noise = state.noise if shared is None else shared
    return torch.where(state.hidden, state.tokens.draw(state.hidden, draws, generator, noise)[0], state.ids)


@dataclass(frozen=True)
class Sampled:
    """Draws from p(x_0 | x_t). Gradients are straight-through if the reward is differentiable, else by REINFORCE.

    With a `seed` all particles share one set of noise at all times, a Latin hypercube (McKay et al., 1979). The
    estimate is then a function of x_t, and weights are differences of one function, not of two noises."""

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

    def clean(self, tilt: Tilt, state: NoisyState, generator: Generator | None) -> Tensor:
        """The draws, (M, P, L) ids."""
        return draw_clean(state, tilt.draws, generator, self._noise(tilt.draws, state.ids.shape[1], state.x.device))

    def _noise(self, draws: int, length: int, device: torch.device) -> Tensor | None:
        """The noise of the seed, (L, M), made once."""
        if self.seed is None:
            return None
        kind = draws, length, device
        if kind not in self._shared:
            self._shared[kind] = shared_uniforms(self.seed, draws, length, device).T
        return self._shared[kind]

    def __call__(self, tilt: Tilt, state: NoisyState, generator: Generator | None) -> Tensor:
        x0 = self.clean(tilt, state, generator)
        if state.relaxed and tilt.differentiable:
            probs = state.clean_probs()
            hard = one_hot(x0, probs.shape[-1]).to(probs.dtype)
            return _average_draws(tilt, state, hard + (probs - probs.detach()))
        return _average_draws(tilt, state, x0, _score(state, x0) if state.relaxed else None)


@dataclass(frozen=True)
class Relaxed:
    """Gumbel-softmax draws (Jang et al., 2017; Maddison et al., 2017), for differentiable rewards. With `hard` the
    reward is that of the largest entries, an exact draw, with straight-through gradients (Ou et al., 2026): noisier
    than `Sampled`, and more expensive."""

    temperature: float = 1.0
    hard: bool = False
    random: bool = field(default=True, init=False, repr=False)
    ignores_time: bool = field(default=True, init=False, repr=False)
    drawn: bool = field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        check_number("Relaxed.temperature", self.temperature, "(0, inf)")
        check_flags(self)

    def with_draws(self, draws: int) -> Relaxed:
        return self

    def __call__(self, tilt: Tilt, state: NoisyState, generator: Generator | None) -> Tensor:
        mu = state.clean_probs()[state.hidden]
        log_mu = torch.where(mu > 0, mu, 1.0).log().masked_fill(mu == 0, NEVER)
        drawn = ((log_mu + _gumbel(state, tilt.draws, generator)) / self.temperature).softmax(-1)
        if self.hard:  # the largest entry, with the gradient of the softmax
            hard = torch.zeros_like(drawn).scatter_(-1, drawn.detach().argmax(-1, keepdim=True), 1.0)
            drawn = hard + (drawn - drawn.detach())
        row, site = state.hidden.nonzero(as_tuple=True)
        draw = torch.arange(len(drawn), device=row.device).unsqueeze(-1)
        clean = state.clean_probs().repeat(len(drawn), 1, 1, 1).index_put((draw, row, site), drawn)
        return _average_draws(tilt, state, clean)


@dataclass(frozen=True)
class SoftInput:
    """r(mu(x_t)): the reward of the posterior mean; for differentiable rewards."""

    random: bool = field(default=False, init=False, repr=False)
    ignores_time: bool = field(default=True, init=False, repr=False)

    def __call__(self, tilt: Tilt, state: NoisyState, generator: Generator | None) -> Tensor:
        if state.relaxed or not len(state.x):
            return tilt.exact(state.clean_probs(), state.of)
        # (L, V) tables of whole rows are large: as many at once as memory for dense tables allows.
        at_once = max(1, rows_at_once(state.tokens.vocab_size) // state.x.shape[1])
        parts = torch.split(torch.arange(len(state.x), device=state.x.device), at_once)
        taken = (state.take(rows) for rows in parts)
        return torch.cat([tilt.exact(some.clean_probs(), some.of) for some in taken])


@dataclass(frozen=True)
class Exact:
    """The expectation over all completions, by enumeration; for few open sites or a small vocabulary. At most `limit`
    sequences are in memory together, so that no row may have more."""

    limit: int = 1_000_000
    random: bool = field(default=False, init=False, repr=False)
    ignores_time: bool = field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        check_whole("Exact.limit", self.limit)

    def __call__(self, tilt: Tilt, state: NoisyState, generator: Generator | None) -> Tensor:
        if state.relaxed:  # each row needs its own gradient
            return self._estimate(tilt, state)
        places = state.tokens.index[:, :1]  # rows of a population that share a prediction are equal
        first, row = distinct(places if state.of is None else torch.cat([places, state.of.unsqueeze(-1)], -1))
        some = state.take(first)
        return torch.cat([self._estimate(tilt, some.take(part)) for part in self._parts(some)])[row]

    def _parts(self, state: NoisyState) -> list[Tensor]:
        """The rows, in parts whose completions are within the limit, or of a single row."""
        ends = (state.clean_probs() > 0).sum(-1).double().prod(-1).cumsum(0)
        rows, first, parts = torch.arange(len(ends), device=ends.device), 0, list[Tensor]()
        while first < len(rows) or not parts:
            before = ends[first - 1] if first else 0.0
            last = max(first + 1, int(torch.searchsorted(ends, before + self.limit, right=True)))
            parts.append(rows[first:last])
            first = last
        return parts

    def _estimate(self, tilt: Tilt, state: NoisyState) -> Tensor:
        row, x0 = support(state.clean_probs().detach().log(), self.limit)
        rank = torch.arange(len(row), device=row.device) - torch.searchsorted(row, row)
        # Entry (k, p) is the k-th completion of row p. Rows with fewer are padded by their first, with weight 0: any
        # other might have no mass, and the gradient of log 0 would be NaN.
        size, place = (int(rank.max()) + 1, len(state.x)), (rank, row)
        taken = torch.zeros(size, dtype=torch.bool, device=row.device).index_put(place, rank >= 0)
        first = x0[torch.searchsorted(row, torch.arange(len(state.x), device=row.device)).clamp(max=len(x0) - 1)]
        score = _score(state, first.repeat(size[0], 1, 1).index_put(place, x0))
        r = tilt.exact(x0, None if state.of is None else state.of[row])
        rewards = r.new_full(size, NEVER).index_put(place, r)
        return tilt.averaged(rewards, torch.where(taken, score, NEVER))


@dataclass(frozen=True)
class Value:
    """A function r_hat(x, t) of the noisy sequence; x is ids, or one-hots for gradients. If it `ignores_time`, a
    particle that has not moved keeps its value."""

    function: Callable[[Tensor, float], Tensor]
    ignores_time: bool = False
    random: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        check_callable("Value.function", self.function, "x and t, a network that returns (P,)")
        check_flags(self)

    def __call__(self, tilt: Tilt, state: NoisyState, generator: Generator | None) -> Tensor:
        return self.function(state.x, state.t)
