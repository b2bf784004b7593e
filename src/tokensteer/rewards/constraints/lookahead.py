"""Hard constraints with look-ahead.

Let mu be a distribution over tokens that factorises over sites. If all later steps drew from it, a masked site would
end as mu, and an open one would keep its token with probability rho_t, that of never being masked again (1 for kernels
that do not remask), or end as mu. V_t(x_t; mu) is the probability that an automaton accepts such a draw: one dynamic
programme. It is used in

- the twist: psi_t = ramp(t) · r_hat/kl + log V_t, finite before the end, and -inf there if the constraint is broken;
- the proposal: q(y) = base(y) · V_s(y; mu) / sum_z base(z) · V_s(z; mu). Draw x_0 from its distribution by site given
  acceptance, then each site of y given x_t and x_0.

For a denoiser that factorises, V_t is the value function of the sampler, remasking or not: all weights are equal, and
log Z = log V of the template exactly.
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
from tokensteer.core.models.denoiser import ignores_time
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

FLOOR = -1e4  # log V where no draw is accepted: below all others, and finite as a twist must be


@dataclass(frozen=True)
class Satisfies:
    """0, or the reward `soft`, for sequences that the automaton accepts, and -inf for all others."""

    automaton: Automaton
    soft: Reward | None = None

    def __call__(self, x0: Tensor) -> Tensor:
        accepted = self.automaton.accepts(x0.argmax(-1) if x0.is_floating_point() else x0)
        reward = torch.zeros_like(accepted, dtype=torch.float64) if self.soft is None else self.soft(x0)
        return torch.where(accepted, reward, NEVER)


@dataclass(frozen=True, eq=False)
class Kept:
    """rho_t: the probability that a site open at time t is never masked again, (B, L) for each of `times`."""

    times: tuple[float, ...]
    table: Tensor

    def at(self, t: float, rows: int) -> Tensor:
        """rho for each particle, (P, L), at the first of the ascending times that is at least t."""
        rho = self.table[min(bisect_left(self.times, t), len(self.times) - 1)]
        if rows % len(rho):
            raise ValueError(
                f"the look-ahead of a constraint differs between {len(rho)} templates, and {rows} rows belong to no "
                "whole number of each: Enumerated() needs one template here, or a kernel without remasking"
            )
        return rho.expand(rows, -1) if len(rho) == 1 else rho.repeat_interleave(rows // len(rho), 0)


def kept(model: Model) -> Kept:
    """rho of a model: the product, backwards in time, of the kernel's probabilities that an open site stays open."""
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
    whole = torch.stack(table)
    alike = bool((whole == whole[:, :1]).all())  # then rows need not be whole populations, as candidates are not
    return Kept((0.0, *(step.t for step in reversed(model.steps))), whole[:, :1] if alike else whole)


def _reveal(measure: SiteMeasure) -> Reveal:
    if not isinstance(measure, Reveal):
        raise ValueError(
            f"constraints need a masked process whose sites move independently of their tokens, and got "
            f"{type(measure).__name__}: use a kernel such as Ancestral or Ranked"
        )
    return measure


def _log(p: Tensor) -> Tensor:
    return p.double().log().clamp(min=LOW).unsqueeze(-1)


@dataclass(frozen=True, eq=False)
class FinalClasses:
    """The distribution of final classes if all later steps draw from mu: log_mu (P, L, C) is mu by classes, rho (P, L)
    the probability that an open site stays open."""

    automaton: Automaton
    mask_id: int
    rho: Tensor
    log_mu: Tensor

    def at(self, z: Tensor) -> Tensor:
        """log-probabilities of the final class of each site of z, (P, L, C): mu, or with probability rho its token."""
        token = self.automaton.point(z)
        if (self.rho < 1).any():
            token = torch.logaddexp(_log(self.rho) + token, _log(1.0 - self.rho) + self.log_mu)
        return torch.where((z == self.mask_id).unsqueeze(-1), self.log_mu, token)

    def log_v(self, z: Tensor) -> Tensor:
        return self.automaton.log_lookahead(self.at(z))

    def take(self, rows: Tensor) -> FinalClasses:
        return replace(self, rho=self.rho[rows], log_mu=self.log_mu[rows])


def _final_classes(
    automaton: Automaton, rho: Tensor, log_x0: SiteDistributions, mask_id: int, masked: Tensor, moving: Tensor
) -> FinalClasses:
    """mu from a prediction, at sites that are `masked`, `moving` or may be masked later, (P, L) each.

    It is uniform over tokens at open sites where the prediction is missing, as after a proposal has tilted only the
    others, or leaves out a class: many networks just repeat the token there.
    """
    read = masked | moving | (rho < 1)
    log_mu = torch.zeros(*read.shape, automaton.step.shape[1], dtype=torch.float64, device=read.device)
    known = read & (log_x0.index >= 0)
    log_p = log_x0.at(known).detach()
    tokens = log_p.new_zeros(1, log_p.shape[-1])
    tokens[:, mask_id] = NEVER
    log_mass, uniform = automaton.log_mass(log_p), automaton.log_mass(tokens)
    incomplete = ~masked[known] & ~((log_mass > LOW / 2) | (uniform < LOW / 2)).all(-1)
    log_mass = torch.where(incomplete.unsqueeze(-1), uniform, log_mass)
    log_mu[known] = (log_mass - log_mass.logsumexp(-1, keepdim=True)).to(log_mu)
    log_mu[read & ~known] = uniform.log_softmax(-1).to(log_mu)
    return FinalClasses(automaton, mask_id, rho, log_mu)


@dataclass(frozen=True)
class LookAhead:
    """log V_t(x_t), the term of the log-twist that the ramp does not scale; `kept` is kept(model). It has no gradient:
    `Constrained` conditions on it instead."""

    automaton: Automaton
    kept: Kept

    def __call__(self, tilt: Tilt, look: NoisyState) -> Tensor:
        rho, masked = self.kept.at(look.t, len(look.x)), look.ids == look.mask_id
        final = _final_classes(self.automaton, rho, look.tokens, look.mask_id, masked, masked)
        return final.log_v(look.ids).clamp(min=FLOOR)


@dataclass(frozen=True)
class SoftEstimate:
    """The estimate of the soft reward alone, 0 if there is none: draws that break the constraint would all be -inf."""

    soft: Tilt | None = None

    @property
    def random(self) -> bool:
        return self.soft is not None and self.soft.estimator.random

    @property
    def ignores_time(self) -> bool:
        return self.soft is None or ignores_time(self.soft.estimator)

    @property
    def drawn(self) -> bool:
        return self.soft is not None and self.soft.drawn

    def with_draws(self, draws: int) -> SoftEstimate:
        return SoftEstimate(None if self.soft is None else self.soft.with_draws(draws))

    def __call__(self, tilt: Tilt, look: NoisyState, generator: Generator | None) -> Tensor:
        if self.soft is None:
            return torch.zeros(len(look.x), dtype=torch.float64, device=look.x.device)
        before = self.soft.meter.rows
        r = self.soft.estimate(look, generator)
        tilt.meter.count(self.soft.meter.rows - before)
        return r


@dataclass(frozen=True)
class Conditioned:
    """q(y) = base(y) · V_s(y)/V(x_t), with V(x_t) the sum of the numerator over y; the base where that is zero.

    `final` is for states y, and `here` (P, L, C) and log_v (P,) are the final classes from x_t and its V. A share
    `defence` of moves is the base's.
    """

    base: Reveal
    final: FinalClasses
    here: Tensor
    log_v: Tensor
    defence: float = 0.0
    log_mass: None = None  # the next weight is unknown: the look-ahead at y uses another prediction

    @property
    def sites(self) -> Sites | None:
        return self.base.sites

    def sample(self, generator: Generator | None) -> Tensor:
        """Draw x_0 given acceptance, then each site of y given x_t and x_0."""
        y = self.base.sample(generator)
        c = self.final.automaton.sample_classes(self.here, generator)
        u = torch.rand((2, *y.shape), generator=generator, device=y.device, dtype=torch.float64)
        conditioned = torch.where(self.base.masked, self._open(y, c, u[0], generator), self._remask(c, u[0]))
        plain = self.log_v == NEVER
        if self.defence > 0:
            plain = plain | (u[1, :, 0] < self.defence)
        return torch.where(plain.unsqueeze(-1), y, conditioned)

    def _open(self, y: Tensor, c: Tensor, u: Tensor, generator: Generator | None) -> Tensor:
        """At sites that the base opens, a token in the class of x_0 if it stays open, else the base's."""
        opens = self.base.masked & (y != self.base.mask_id) & (u < self.final.rho)
        tokens = self.final.automaton.sample_tokens(c[opens], self.base.log_x0.at(opens), generator)
        y = y.clone()
        # As in `Reveal`: only probabilities of NaN yield the mask, and `log_prob` is then NaN.
        y[opens] = torch.where(tokens == self.base.mask_id, y[opens], tokens)
        return y

    def _remask(self, c: Tensor, u: Tensor) -> Tensor:
        """Open sites stay or are masked again, given that they end in the class of x_0."""
        pick = c.unsqueeze(-1)
        log_stay = self.base.log_stay.double() + self.final.at(self.base.x).gather(-1, pick).squeeze(-1)
        log_move = self.base.log_move.double() + self.final.log_mu.gather(-1, pick).squeeze(-1)
        return self.base.x.masked_fill(u < (log_move - log_stay).sigmoid(), self.base.mask_id)

    def log_prob(self, y: Tensor) -> Tensor:
        log_base, gain = self.base.log_prob(y), self.final.log_v(y) - self.log_v
        log_q = torch.where(self.log_v == NEVER, log_base, log_base + gain.to(log_base.dtype))
        if self.defence > 0:
            log_q = torch.logaddexp(log_q + math.log1p(-self.defence), log_base + math.log(self.defence))
        return log_q

    def take(self, rows: Tensor) -> Conditioned:
        base, final = self.base.take(rows), self.final.take(rows)
        return Conditioned(base, final, self.here[rows], self.log_v[rows], self.defence)


@dataclass(frozen=True)
class Constrained:
    """The base proposal conditioned on acceptance; optimal for a denoiser that factorises.

    `kept` is kept(model). q has no mass where the base's token distribution rules out acceptance, which is right if it
    has full support, as a softmax has. For a truncated one, a share `defence` of moves is the base's, and q covers p.
    """

    automaton: Automaton
    kept: Kept
    base: SiteProposal = field(default_factory=FromModel)
    defence: float = 0.0

    def __post_init__(self) -> None:
        check_number("Constrained.defence", self.defence, "[0, 1)")

    @property
    def parts(self) -> tuple[SiteProposal]:
        return (self.base,)

    @property
    def needs_gradient(self) -> bool:
        return self.base.needs_gradient

    @property
    def meters(self) -> tuple[Meter, ...]:
        return self.base.meters

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> Measure:
        q = _reveal(self.base(x, evaluation, step, model, twist))
        rho, moving = self.kept.at(step.s, len(x)), q.log_move > NEVER
        final = _final_classes(self.automaton, rho, q.log_x0, q.mask_id, q.masked, moving)
        # The final classes from x_t are a mean over the base's moves; a masked site ends as mu, moved or not.
        log_stay, log_move = _log(q.log_stay.double().exp()), _log(q.log_move.double().exp())
        ends = torch.logaddexp(log_stay + final.at(q.x), log_move + final.log_mu)
        here = torch.where(q.masked.unsqueeze(-1), final.log_mu, ends)
        return Conditioned(q, final, here, self.automaton.log_lookahead(here), self.defence)


def constrain(
    model: Model, automaton: Automaton, tilt: Tilt | None = None, base: SiteProposal | None = None
) -> Steering:
    """The target model(x_0) · exp(r(x_0)/kl) on the sequences that the automaton accepts, with look-ahead.

    `tilt` is an optional soft reward; `base` (by default the model) chooses sites and the token distribution that is
    conditioned. Raises if no sequence that keeps the template is accepted.
    """
    if model.kernel.mask_id == NO_MASK:
        raise ValueError("constraints need a masked process, and this kernel has no mask: use Ancestral")
    if tilt is not None and tilt.log_lookahead is not None:
        raise ValueError("constrain: this tilt has a log_lookahead already: give a tilt without one")
    automaton = automaton.to(model.device)
    _check_possible(model, automaton)
    rho = kept(model)
    soft = Tilt(Satisfies(automaton), ramp=end_ramp) if tilt is None else tilt
    reward = Satisfies(automaton, None if tilt is None else tilt.reward)
    twist = replace(soft, reward=reward, estimator=SoftEstimate(tilt), log_lookahead=LookAhead(automaton, rho))
    return Steering(model, twist, Constrained(automaton, rho, FromModel() if base is None else base))


def _check_possible(model: Model, automaton: Automaton) -> None:
    if automaton.vocab_size != model.vocab_size:
        raise ValueError(
            f"the automaton is over {automaton.vocab_size} tokens and the model over {model.vocab_size}, its mask "
            f"included: make it with vocab_size={model.vocab_size}"
        )
    ids, mask_id = torch.arange(model.vocab_size, device=model.device), model.kernel.mask_id
    for row, canvas in enumerate(model.start(model.populations, None)):
        free = (canvas == mask_id).unsqueeze(-1)
        if not automaton.possible(len(canvas), torch.where(free, ids != mask_id, ids == canvas.unsqueeze(-1))):
            which = f" (row {row})" if model.populations > 1 else ""
            raise ValueError(
                f"a pattern that cannot be met: no sequence of length {len(canvas)} that keeps the template{which} "
                "satisfies it. Check the pattern, the length and the fixed tokens"
            )
