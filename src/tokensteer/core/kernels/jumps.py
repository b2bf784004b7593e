"""Kernels of continuous time: tau-leaping, and event-driven samplers that open one site at a time.

`TauLeap` keeps the rates at t over a step and converges to continuous time at first order. If the denoiser ignores
time, the opening times do not matter to the sequence, so `FirstHitting` samples only the jump chain: every step opens
one masked site, and there is no discretisation error. `TimedFirstHitting` is for denoisers that use the time. With m
sites masked at time t, and mu summing to one, none opens before tau with probability ((1 - alpha_tau)/(1 - alpha_t))^m
for any mu, so the time of the next jump is drawn first, and the denoiser is evaluated there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Generator, Tensor

from tokensteer.core.categorical.sites import Categoricals, by_site, map_rows
from tokensteer.core.kernels.kernel import MaskedKernel, Memory, safe_log
from tokensteer.core.kernels.measure import Reveal, Table
from tokensteer.core.kernels.noise import Interpolating
from tokensteer.core.kernels.rates import hazard, next_opening, uniform_rate
from tokensteer.core.kernels.schedule import Linear, Schedule, alphas, uniform_steps
from tokensteer.core.numerics.draws import NEVER, categorical
from tokensteer.core.particles.path import Sites, Step


def leap(x: Tensor, rates: Tensor, span: float) -> Table:
    """Tau-leaping over a time `span`, for any rates (P, L, V): each site moves with probability 1 - exp(-span·sum_v
    rates) to a token in proportion to its rate. Correct to first order in the span."""
    total = rates.sum(-1, keepdim=True)
    log_leave = torch.where(total > 0, (-torch.expm1(-span * total)).log() - total.log(), NEVER)
    return Table((rates.log() + log_leave).scatter(-1, x.unsqueeze(-1), -span * total), x=x)


@dataclass(frozen=True)
class TauLeap(MaskedKernel):
    """Tau-leaping of the masked process: the rate at t is kept over the step, and the last step opens all that is left.

    A masked site opens with probability 1 - exp(-(t - s)·hazard(t)). The marginals are correct to first order in t - s;
    those of `Ancestral` are exact.
    """

    schedule: Schedule = field(default_factory=Linear)

    def survival(self, step: Step) -> float:
        alpha_t, alpha_s = alphas(self.schedule, step)
        return alpha_t / alpha_s

    def __call__(self, x: Tensor, log_x0: Categoricals, step: Step, sites: Sites | None = None) -> Reveal:
        log_stay = NEVER if step.s == 0 else -(step.t - step.s) * hazard(self.schedule, step.t)
        masked, zeros = x == self.mask_id, torch.zeros(x.shape, dtype=log_x0.dtype, device=x.device)
        log_move = torch.full_like(zeros, NEVER).masked_fill(masked, safe_log(-math.expm1(log_stay)))
        return Reveal(x, zeros.masked_fill(masked, log_stay), log_move, by_site(log_x0), self.mask_id)


@dataclass(frozen=True)
class UniformLeap(Interpolating):
    """Tau-leaping of uniform noise: `uniform_rate` at t is kept over the step. The first and the last step, where rates
    are infinite, are the exact ones of `Interpolating`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.prior) - min(self.prior) > 1e-12:
            raise ValueError("UniformLeap is for uniform noise: make it as UniformLeap((1/V,) * V, schedule)")

    def __call__(self, x: Tensor, log_x0: Categoricals, step: Step, sites: Sites | None = None) -> Table:
        if step.s == 0 or self.schedule.alpha(step.t) <= 0:
            return super().__call__(x, log_x0, step, sites)

        def log_p(rows: Tensor, log_x0: Tensor) -> Tensor:
            return leap(x[rows], uniform_rate(x[rows], log_x0, step.t, self.schedule), step.t - step.s).log_p

        return Table(map_rows(log_p, log_x0), x=x)


def event_steps(canvas: Tensor, mask_id: int) -> tuple[Step, ...]:
    """As many steps as the template (L,) or (B, L) has free sites, at most in a row; time is the share masked."""
    return uniform_steps(int((canvas == mask_id).sum(-1).max()))


@dataclass(frozen=True)
class FirstHitting(MaskedKernel):
    """The masked process in continuous time, jump by jump: one masked site opens, each with equal probability.

    Use it with `event_steps(template, mask_id)`: as many denoiser calls as free sites, and no discretisation error if
    the denoiser ignores time; otherwise it is evaluated at the share masked, and `TimedFirstHitting` is exact. The
    opening times are independent of all else: `opening_times`.
    """

    def __call__(self, x: Tensor, log_x0: Categoricals, step: Step, sites: Sites | None = None) -> OneSite:
        masked, zeros = x == self.mask_id, torch.zeros(x.shape, dtype=log_x0.dtype, device=x.device)
        log_each = -masked.sum(-1, keepdim=True).to(log_x0.dtype).log()
        return OneSite(x, zeros, torch.where(masked, log_each, NEVER), by_site(log_x0), self.mask_id)


@dataclass(frozen=True)
class TimedFirstHitting(FirstHitting):
    """`FirstHitting`, exact for any denoiser: particles have clocks, and the denoiser is evaluated when a site opens.

    It also takes `event_steps`: the same number of calls, each with a tensor (P,) of times. Ramps get the time of the
    step, the share masked. The clock is a memory, so x_t is not the whole state: no enumeration, no particle Gibbs.
    """

    schedule: Schedule = field(default_factory=Linear)

    def remember(self, x: Tensor, before: Memory, log_x0: Categoricals | None, generator: Generator | None) -> Memory:
        """When the next site opens, (P,); the parent's memory is when the last one opened."""
        now = torch.ones_like(x[:, 0], dtype=torch.float64) if before is None else before
        return next_opening(self.schedule, (x == self.mask_id).sum(-1), now, generator)

    def times(self, memory: Tensor) -> Tensor:
        return memory

    def recall(self, x: Tensor, log_x0: Categoricals, step: Step, memory: Tensor) -> Sites | None:
        return None


@dataclass(frozen=True)
class OneSite(Reveal):
    """A jump: site l opens with token v at mass exp(log_move[l] + log_x0[l, v]), and all others stay (log_stay is 0).

    If no site may open, all stay. Where sites may open and none has a token of any mass, as in a product of models
    that share none, a normalised jump opens one of them: the model gives it no mass, so the particle dies, and no mask
    is left at the end. It does not factorise: `dense` covers it, and `support` lists it.
    """

    factorises: ClassVar[bool] = False

    @property
    def moves(self) -> Tensor:
        """Which particles have a site to open, (P,)."""
        return (self.log_move > NEVER).any(-1)

    def draw(self, generator: Generator | None) -> tuple[Tensor, Tensor]:
        # If no site may open, an arbitrary one is drawn and not opened.
        moves = self.moves.unsqueeze(-1)
        site = categorical(torch.where(moves, self.log_move, 0.0), generator).unsqueeze(-1)
        opens = moves & (torch.arange(self.x.shape[-1], device=self.x.device) == site)
        token, log_token = self.log_x0.draw_one(opens, self.mask_id, generator)
        log_p = torch.where(opens, self.log_move + log_token, 0.0).sum(-1)
        return torch.where(opens, token, self.x), log_p

    def log_prob(self, y: Tensor) -> Tensor:
        return torch.where((y != self.x).sum(-1) == self.moves, super().log_prob(y), NEVER)

    def total(self) -> Tensor:
        return torch.where(self.moves, (self.log_move + self.token_mass).logsumexp(-1), 0.0)

    def normalise(self) -> Reveal:
        return self._or_any(super().normalise())

    def _or_any(self, jumps: Reveal) -> Reveal:
        """Normalised `jumps`; with the sites of this measure where it may open some and no token is left for them."""
        lost = (self.moves & (jumps.log_move == NEVER).all(-1)).unsqueeze(-1)
        instead = torch.where(lost, self.log_move, 0.0).log_softmax(-1)
        return replace(jumps, log_move=torch.where(lost, instead, jumps.log_move))

    def _normalise_outcomes(self) -> OneSite:
        total = self.log_move.logsumexp(-1, keepdim=True)
        return replace(self, log_move=self.log_move - torch.where(total == NEVER, 0.0, total))

    def tilt(self, h: Categoricals) -> Reveal:
        """q ∝ m · exp(h): the log-mass of token v at site l gains h[l, v] - h[l, mask], as its rate would."""
        h = by_site(h)
        jumps = replace(self, log_move=self.log_move - h.entry(self.x, self.masked))
        return self._or_any(jumps.tilt_each(h, carry_mass=True)._normalise_outcomes())

    def pin(self, fixed: Tensor) -> OneSite:
        return replace(self, log_move=self.log_move.masked_fill(fixed, NEVER))._normalise_outcomes()

    def support(self, limit: int) -> tuple[Tensor, Tensor]:
        """Every sequence within one jump: `rows` (K,) in ascending order and `sequences` (K, L). None for a particle
        that should jump and has no token for it."""
        possible = self.masked.unsqueeze(-1) & (self.log_x0.dense() > NEVER) & (self.log_move > NEVER).unsqueeze(-1)
        if int(possible.sum()) > limit:
            count = int(possible.sum())
            raise ValueError(f"{count} jumps are more than the limit of {limit}: use a smaller vocabulary")
        rows, site, token = possible.nonzero(as_tuple=True)
        y = self.x[rows]
        y[torch.arange(len(rows), device=rows.device), site] = token
        still = (~self.moves).nonzero().squeeze(-1)
        order = torch.cat([rows, still]).argsort(stable=True)
        return torch.cat([rows, still])[order], torch.cat([y, self.x[still]])[order]
