"""Hard constraints on the canvas, with look-ahead.

Let mu be a token law that factorises over sites. If the rest of the way drew tokens from it, a masked site would end as
mu, and an open one would keep its token with probability rho_t, the chance that it is never masked again (1 for kernels
that do not remask), or end as mu. V_t(x_t; mu) is the probability that an automaton accepts such a draw: one dynamic
programme. It is

- the twist: psi_t = ramp(t) · r_hat/kl + log V_t, finite on the way and -inf at the end where the constraint is broken;
- the proposal: q(y) = base(y) · V_s(y; mu) / sum_z base(z) · V_s(z; mu). Draw x_0 from its law by site given
  acceptance, then each site of y given x_t and x_0.

For a denoiser that factorises, V_t is the value function of the sampler itself, remasking or not: all weights are
equal, and log Z is log V of the template without any error.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor

from tokensteer.core.categorical.sites import SiteDistributions
from tokensteer.core.kernels.kernel import NO_MASK
from tokensteer.core.kernels.measure import Reveal, SiteMeasure
from tokensteer.core.models.denoiser import Timeless
from tokensteer.core.models.diffusion import Model
from tokensteer.core.numerics.batching import Meter
from tokensteer.core.numerics.domains import check_number
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.particles.path import Evaluation, Measure, Sites, Step
from tokensteer.core.proposals.proposal import FromModel, SiteProposal
from tokensteer.core.steering.steering import Steering
from tokensteer.core.twists.estimators import NoisyState
from tokensteer.core.twists.ramps import end as end_ramp
from tokensteer.core.twists.tilt import Reward, Tilt
from tokensteer.rewards.constraints.automaton import LOW, Automaton

FLOOR = -1e4  # log V of a state without hope: below all others, and finite as a twist must be


@dataclass(frozen=True)
class Satisfies:
    """The reward of a constraint: 0, or `soft`, for sequences that the automaton accepts; -inf for all others."""

    automaton: Automaton
    soft: Reward | None = None

    def __call__(self, x0: Tensor) -> Tensor:
        accepted = self.automaton.accepts(x0.argmax(-1) if x0.is_floating_point() else x0)
        reward = torch.zeros_like(accepted, dtype=torch.float64) if self.soft is None else self.soft(x0)
        return torch.where(accepted, reward, NEVER)


# ---- what becomes of a site


@dataclass(frozen=True, eq=False)
class Kept:
    """rho_t: the probability that a site open at time t is never masked again, (B, L) for each of `times`."""

    times: tuple[float, ...]
    table: Tensor

    def at(self, t: float, rows: int) -> Tensor:
        """rho for each particle, (P, L), at the first of the times, which ascend, that is not before t."""
        rho = self.table[min(bisect_left(self.times, t), len(self.times) - 1)]
        return rho.expand(rows, -1) if len(rho) == 1 else rho.repeat_interleave(rows // len(rho), 0)


def kept(model: Model) -> Kept:
    """Ask the kernel, backwards in time, for the chance that an open site stays open."""
    canvas = model.start(model.populations, None)
    free = canvas == model.kernel.mask_id
    canvas = canvas.masked_fill(free, 1 if model.kernel.mask_id == 0 else 0)
    any_token = torch.zeros(1, dtype=model.dtype, device=model.device).expand(*canvas.shape, model.vocab_size)
    rho = torch.ones_like(canvas, dtype=torch.float64)
    table = [rho]
    for step in reversed(model.steps):
        if model.kernel.remasks(step):
            rho = rho * _reveal(model.step_with(canvas, any_token, step, None)).log_stay.double().exp()
        table.append(rho)
    return Kept((0.0, *(step.t for step in reversed(model.steps))), torch.stack(table))


def _reveal(measure: SiteMeasure) -> Reveal:
    if not isinstance(measure, Reveal):
        raise ValueError(
            f"constraints need a masked process whose sites move whatever their tokens, and {type(measure).__name__} "
            "is none: use a kernel such as Ancestral or Ranked"
        )
    return measure


def _spoken(automaton: Automaton, log_x0: Tensor, mask_id: int, masked: Tensor) -> Tensor:
    """log mu by classes (K, C) from a network's answer (K, V) at sites that are `masked` (K,) or open.

    A network need not say anything of an open site, and many just repeat its token: then any token is as likely.
    """
    log_mass, anything = automaton.log_mass(log_x0), _any_token(automaton, log_x0, mask_id)
    silent = ~masked & ~((log_mass > LOW / 2) | (anything < LOW / 2)).all(-1)
    log_mass = torch.where(silent.unsqueeze(-1), anything, log_mass)
    return log_mass - log_mass.logsumexp(-1, keepdim=True)


def _any_token(automaton: Automaton, like: Tensor, mask_id: int) -> Tensor:
    """The log of how many tokens each class has, the mask aside, (1, C)."""
    tokens = like.new_zeros(1, like.shape[-1])
    tokens[:, mask_id] = NEVER
    return automaton.log_mass(tokens)


def _law(automaton: Automaton, log_x0: SiteDistributions, mask_id: int, masked: Tensor, read: Tensor) -> Tensor:
    """log mu by classes, (P, L, C), at the sites to be read (P, L). Where there is no law, as at open sites once a
    proposal has bent those of the others, any token is as likely."""
    law = torch.zeros(*read.shape, automaton.step.shape[1], dtype=torch.float64, device=read.device)
    known = read & (log_x0.index >= 0)
    spoken = log_x0.at(known).detach()
    law[known] = _spoken(automaton, spoken, mask_id, masked[known]).to(law)
    law[read & ~known] = _any_token(automaton, spoken, mask_id).log_softmax(-1).to(law)
    return law


def _log(p: Tensor) -> Tensor:
    return p.double().log().clamp(min=LOW).unsqueeze(-1)


def _final(automaton: Automaton, log_mu: Tensor, z: Tensor, mask_id: int, rho: Tensor) -> Tensor:
    """The law by classes (P, L, C) of what becomes of each site of z: mu, or with probability rho its token."""
    token = automaton.point(z)
    if (rho < 1).any():
        token = torch.logaddexp(_log(rho) + token, _log(1.0 - rho) + log_mu)
    return torch.where((z == mask_id).unsqueeze(-1), log_mu, token)


# ---- the twist


@dataclass(frozen=True)
class LookAhead:
    """log V_t(x_t), the term of the twist that counts in full whatever the ramp; `kept` is kept(model). No gradient
    follows it: the constraint is left to `Constrained`."""

    automaton: Automaton
    kept: Kept

    def __call__(self, tilt: Tilt, look: NoisyState) -> Tensor:
        ids, rho = look.ids, self.kept.at(look.t, len(look.x))
        masked = ids == look.mask_id
        log_mu = _law(self.automaton, look.tokens, look.mask_id, masked, masked | (rho < 1))
        final = _final(self.automaton, log_mu, ids, look.mask_id, rho)
        return self.automaton.log_chance(final).clamp(min=FLOOR)


@dataclass(frozen=True)
class Softly:
    """The estimate of a reward without its constraint, since a draw that breaks it says little: 0 if there is none."""

    soft: Tilt | None = None

    @property
    def random(self) -> bool:
        return self.soft is not None and self.soft.estimator.random

    @property
    def ignores_time(self) -> bool:
        inner = None if self.soft is None else self.soft.estimator
        return inner is None or (isinstance(inner, Timeless) and inner.ignores_time)

    @property
    def drawn(self) -> bool:
        return self.soft is not None and self.soft.drawn

    def with_draws(self, draws: int) -> Softly:
        return Softly(None if self.soft is None else self.soft.with_draws(draws))

    def __call__(self, tilt: Tilt, look: NoisyState, generator: Generator | None) -> Tensor:
        if self.soft is None:
            return look.zeros(len(look.x))
        before = self.soft.meter.rows
        r = self.soft.estimate(look, generator)
        tilt.meter.count(self.soft.meter.rows - before)
        return r


# ---- the proposal


@dataclass(frozen=True)
class Conditioned:
    """q(y) = base(y) · V_s(y)/V(x_t), with V(x_t) the sum of the numerator over y; the base where that is zero.

    log_mu (P, L, C) is the token law of the base by classes, rho (P, L) the chance that an open site of y stays, `here`
    (P, L, C) what becomes of x_t and log_v (P,) its V. A share `defence` of the moves is the base's own.
    """

    base: Reveal
    automaton: Automaton
    log_mu: Tensor
    rho: Tensor
    here: Tensor
    log_v: Tensor
    defence: float = 0.0
    log_mass: None = None  # the weight to come is not known: the look-ahead at y has another prediction

    @property
    def sites(self) -> Sites | None:
        return self.base.sites

    def _ahead(self, y: Tensor) -> Tensor:
        """What becomes of y, by classes."""
        return _final(self.automaton, self.log_mu, y, self.base.mask_id, self.rho)

    def sample(self, generator: Generator | None) -> Tensor:
        """Draw x_0 given acceptance, then each site of y given x_t and x_0."""
        y = self.base.sample(generator)
        c = self.automaton.sample_classes(self.here, generator)
        u = torch.rand((2, *y.shape), generator=generator, device=y.device, dtype=torch.float64)
        conditioned = torch.where(self.base.masked, self._open(y, c, u[0], generator), self._remask(c, u[0]))
        plain = self.log_v == NEVER
        if self.defence > 0:
            plain = plain | (u[1, :, 0] < self.defence)
        return torch.where(plain.unsqueeze(-1), y, conditioned)

    def _open(self, y: Tensor, c: Tensor, u: Tensor, generator: Generator | None) -> Tensor:
        """At sites that the base opens, the token of x_0 if it is to stay, else any."""
        opens = self.base.masked & (y != self.base.mask_id) & (u < self.rho)
        tokens = self.automaton.token_of(c[opens], self.base.log_x0.at(opens), generator)
        y = y.clone()
        # As in `Reveal`: only a law of NaNs lands on the mask, and `log_prob` then says NaN.
        y[opens] = torch.where(tokens == self.base.mask_id, y[opens], tokens)
        return y

    def _remask(self, c: Tensor, u: Tensor) -> Tensor:
        """Open sites stay or are masked again, as likely as they then end in the class of x_0."""
        pick = c.unsqueeze(-1)
        log_stay = self.base.log_stay.double() + self._ahead(self.base.x).gather(-1, pick).squeeze(-1)
        log_move = self.base.log_move.double() + self.log_mu.gather(-1, pick).squeeze(-1)
        return self.base.x.masked_fill(u < (log_move - log_stay).sigmoid(), self.base.mask_id)

    def log_prob(self, y: Tensor) -> Tensor:
        log_base = self.base.log_prob(y)
        gain = self.automaton.log_chance(self._ahead(y)) - self.log_v
        log_q = torch.where(self.log_v == NEVER, log_base, log_base + gain.to(log_base.dtype))
        if self.defence > 0:
            log_q = torch.logaddexp(log_q + math.log1p(-self.defence), log_base + math.log(self.defence))
        return log_q

    def take(self, rows: Tensor) -> Conditioned:
        log_mu, rho, here, log_v = self.log_mu[rows], self.rho[rows], self.here[rows], self.log_v[rows]
        return Conditioned(self.base.take(rows), self.automaton, log_mu, rho, here, log_v, self.defence)


@dataclass(frozen=True)
class Constrained:
    """The base proposal conditioned on acceptance: the best there is for a denoiser that factorises.

    `kept` is kept(model). q has no mass where the base's token law leaves no hope, which is right if that law has full
    support, as any softmax has. For a truncated one, `defence` > 0 lets a share of moves be the base's own, so that
    nothing is ever missed.
    """

    automaton: Automaton
    kept: Kept
    base: SiteProposal = field(default_factory=FromModel)
    defence: float = 0.0

    def __post_init__(self) -> None:
        check_number("Constrained.defence", self.defence, "[0, 1)")

    @property
    def needs_gradient(self) -> bool:
        return self.base.needs_gradient

    @property
    def meters(self) -> tuple[Meter, ...]:
        return self.base.meters

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> Measure:
        q = _reveal(self.base(x, evaluation, step, model, twist))
        rho = self.kept.at(step.s, len(x))
        read = q.masked | (q.log_move > NEVER) | (rho < 1)
        log_mu = _law(self.automaton, q.log_x0, q.mask_id, q.masked, read)
        here = self._here(q, log_mu, rho)
        return Conditioned(q, self.automaton, log_mu, rho, here, self.automaton.log_chance(here), self.defence)

    def _here(self, q: Reveal, log_mu: Tensor, rho: Tensor) -> Tensor:
        """What becomes of x_t, by classes: a mean over the base's moves. A masked site ends as mu, moved or not."""
        log_stay, log_move = _log(q.log_stay.double().exp()), _log(q.log_move.double().exp())
        stays = _final(self.automaton, log_mu, q.x, q.mask_id, rho)
        return torch.where(q.masked.unsqueeze(-1), log_mu, torch.logaddexp(log_stay + stays, log_move + log_mu))


def constrain(
    model: Model, automaton: Automaton, tilt: Tilt | None = None, base: SiteProposal | None = None
) -> Steering:
    """The target model(x_0) · exp(r(x_0)/kl) on the sequences that the automaton accepts, with look-ahead.

    `tilt` is the soft reward, if there is one; `base` (by default the model) chooses sites and the token law that is
    conditioned. Raises when no sequence that keeps the template is accepted.
    """
    if model.kernel.mask_id == NO_MASK:
        raise ValueError("constraints look ahead along a masked process, and this kernel has no mask: use Ancestral")
    if tilt is not None and tilt.log_lookahead is not None:
        raise ValueError("constrain: this tilt has a term beside its estimates already; give the tilt it was made from")
    automaton = automaton.to(model.device)
    _check_possible(model, automaton)
    rho = kept(model)
    soft = Tilt(Satisfies(automaton), ramp=end_ramp) if tilt is None else tilt
    reward = Satisfies(automaton, None if tilt is None else tilt.reward)
    twist = replace(soft, reward=reward, estimator=Softly(tilt), log_lookahead=LookAhead(automaton, rho))
    return Steering(model, twist, Constrained(automaton, rho, FromModel() if base is None else base))


def _check_possible(model: Model, automaton: Automaton) -> None:
    if automaton.vocab_size != model.vocab_size:
        raise ValueError(
            f"the automaton is over {automaton.vocab_size} tokens and the model over {model.vocab_size}, its mask "
            f"included: make it with vocab_size={model.vocab_size}"
        )
    ids = torch.arange(model.vocab_size, device=model.device)
    mask_id = model.kernel.mask_id
    for row, canvas in enumerate(model.start(model.populations, None)):
        free = (canvas == mask_id).unsqueeze(-1)
        if not automaton.possible(len(canvas), torch.where(free, ids != mask_id, ids == canvas.unsqueeze(-1))):
            which = f" (row {row})" if model.populations > 1 else ""
            raise ValueError(
                f"a pattern that cannot be met: no sequence of length {len(canvas)} that keeps the template{which} "
                "satisfies it. Check the pattern, the length and the fixed tokens"
            )
