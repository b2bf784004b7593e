"""Kernels of continuous time: tau-leaping, and the event-driven sampler that opens one site at a time.

`TauLeap` freezes the rates at t for the length of a step and converges to continuous time at first order. For a
denoiser that ignores time the opening times do not matter to the sequence, so `FirstHitting` follows the jump chain
alone: every step opens one masked site, chosen together with its token, and there is no error of discretisation.
`TimedFirstHitting` is that for denoisers that look at the time. With m sites masked at time t, and mu summing to one,
none opens before tau with probability ((1 - alpha_tau)/(1 - alpha_t))^m whatever mu says, so the time of the next jump
is drawn first, and the denoiser is asked then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor

from tokensteer.core.categorical.sites import Laws, row_by_row, tokens_of
from tokensteer.core.kernels.kernel import PlainKernel
from tokensteer.core.kernels.measure import Reveal, Table
from tokensteer.core.kernels.noise import Interpolating
from tokensteer.core.kernels.rates import hazard, next_opening, uniform_rate
from tokensteer.core.kernels.schedule import Linear, Schedule, uniform_steps
from tokensteer.core.numerics.domains import check_whole
from tokensteer.core.numerics.draws import NEVER, categorical
from tokensteer.core.particles.path import Step


def leap(x: Tensor, rates: Tensor, span: float) -> Table:
    """Tau-leaping over a time `span`, for any rates (P, L, V): each site leaves with probability 1 - exp(-span·sum_v
    rates) and takes a token in proportion to its rate. Right to first order in the span."""
    total = rates.sum(-1, keepdim=True)
    log_leave = torch.where(total > 0, (-torch.expm1(-span * total)).log() - total.log(), NEVER)
    return Table((rates.log() + log_leave).scatter(-1, x.unsqueeze(-1), -span * total), x=x)


@dataclass(frozen=True)
class TauLeap(PlainKernel):
    """Tau-leaping of the masked process: the rate at t is kept over the step, and what is left opens at the end.

    A masked site opens with probability 1 - exp(-(t - s)·hazard(t)). Marginals hold to first order in t - s, where
    `Ancestral` keeps them exactly.
    """

    mask_id: int
    schedule: Schedule = field(default_factory=Linear)

    def __post_init__(self) -> None:
        check_whole("TauLeap.mask_id", self.mask_id, 0)

    def survival(self, step: Step) -> float:
        return self.schedule.alpha(step.t) / (1.0 if step.s == 0 else self.schedule.alpha(step.s))

    def __call__(self, x: Tensor, log_x0: Laws, step: Step, sites: Tensor | None = None) -> Reveal:
        log_stay = NEVER if step.s == 0 else -(step.t - step.s) * hazard(self.schedule, step.t)
        opens = -math.expm1(log_stay)
        masked, zeros = x == self.mask_id, torch.zeros(x.shape, dtype=log_x0.dtype, device=x.device)
        log_move = torch.full_like(zeros, NEVER).masked_fill(masked, math.log(opens) if opens > 0 else NEVER)
        return Reveal(x, zeros.masked_fill(masked, log_stay), log_move, tokens_of(log_x0), self.mask_id)


@dataclass(frozen=True)
class UniformLeap(Interpolating):
    """Tau-leaping of uniform noise: `uniform_rate` at t is kept over the step. The first and the last step, where rates
    are not finite, are those of `Interpolating`, exact."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.prior) - min(self.prior) > 1e-12:
            raise ValueError("UniformLeap is for uniform noise: make it as UniformLeap((1/V,) * V, schedule)")

    def __call__(self, x: Tensor, log_x0: Laws, step: Step, sites: Tensor | None = None) -> Table:
        if step.s == 0 or self.schedule.alpha(step.t) <= 0:
            return super().__call__(x, log_x0, step, sites)

        def log_p(rows: Tensor, log_x0: Tensor) -> Tensor:
            return leap(x[rows], uniform_rate(x[rows], log_x0, step.t, self.schedule), step.t - step.s).log_p

        return Table(row_by_row(log_p, log_x0), x=x)


def event_steps(canvas: Tensor, mask_id: int) -> tuple[Step, ...]:
    """One step for each free site of a template (L,) or (B, L), the most of any row; the time is the share masked."""
    return uniform_steps(int((canvas == mask_id).sum(-1).max()))


@dataclass(frozen=True)
class FirstHitting(PlainKernel):
    """The masked process in continuous time, jump by jump: one masked site, any with equal probability, opens.

    Use it with `event_steps(template, mask_id)`: as many denoiser calls as free sites, and no discretisation error for
    a denoiser that does not look at the time; one that does is shown the share masked, and wants `TimedFirstHitting`.
    When the sites open is independent of all else: `opening_times`.
    """

    mask_id: int

    def __post_init__(self) -> None:
        check_whole("FirstHitting.mask_id", self.mask_id, 0)

    def __call__(self, x: Tensor, log_x0: Laws, step: Step, sites: Tensor | None = None) -> OneSite:
        masked, zeros = x == self.mask_id, torch.zeros(x.shape, dtype=log_x0.dtype, device=x.device)
        log_each = -masked.sum(-1, keepdim=True).to(log_x0.dtype).log()
        return OneSite(x, zeros, torch.where(masked, log_each, NEVER), tokens_of(log_x0), self.mask_id)


@dataclass(frozen=True)
class TimedFirstHitting(PlainKernel):
    """`FirstHitting` for any denoiser, exactly: each particle has a clock, and the denoiser is asked when a site opens.

    Use it with `event_steps` too: the same number of calls, each with t a tensor (P,) of times that differ. Ramps see
    the time of the step, the share masked; they only have to be consistent. The clock is a memory of the particle, so
    x_t is not the whole state: no enumeration, no particle Gibbs.
    """

    mask_id: int
    schedule: Schedule = field(default_factory=Linear)

    def __post_init__(self) -> None:
        check_whole("TimedFirstHitting.mask_id", self.mask_id, 0)

    def remember(
        self, x: Tensor, before: Tensor | None, log_x0: Laws | None, generator: Generator | None
    ) -> Tensor | None:
        """When the next site opens, (P,); the parent's memory is when the last one did."""
        now = torch.ones_like(x[:, 0], dtype=torch.float64) if before is None else before
        return next_opening(self.schedule, (x == self.mask_id).sum(-1), now, generator)

    def times(self, memory: Tensor) -> Tensor:
        return memory

    def recall(self, x: Tensor, log_x0: Laws, step: Step, memory: Tensor) -> Tensor | None:
        return None

    def __call__(self, x: Tensor, log_x0: Laws, step: Step, sites: Tensor | None = None) -> OneSite:
        return FirstHitting(self.mask_id)(x, log_x0, step)


@dataclass(frozen=True)
class OneSite(Reveal):
    """A jump: site l opens with token v at mass exp(log_move[l] + log_x0[l, v]), and all others stay (log_stay is 0).

    Where no site may open, all stay. It does not factorise over sites: `dense` only covers it, and `support` lists it.
    """

    @property
    def factorises(self) -> bool:
        return False

    @property
    def moves(self) -> Tensor:
        """Which particles have a site to open, (P,)."""
        return (self.log_move > NEVER).any(-1)

    def draw(self, generator: Generator | None) -> tuple[Tensor, Tensor]:
        # Where no site may open any is drawn, and does not.
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

    def _normalise_outcomes(self) -> OneSite:
        total = self.log_move.logsumexp(-1, keepdim=True)
        return replace(self, log_move=self.log_move - torch.where(total == NEVER, 0.0, total))

    def tilt(self, h: Laws) -> Reveal:
        """q ∝ m · exp(h): the jump to token v at site l gains h[l, v] - h[l, mask], as its rate would."""
        h = tokens_of(h)
        jumps = replace(self, log_move=self.log_move - h.entry(self.x, self.masked))
        return jumps.tilt_each(h, carry_mass=True)._normalise_outcomes()

    def pin(self, fixed: Tensor) -> OneSite:
        """Sites of a prompt never open."""
        return replace(self, log_move=self.log_move.masked_fill(fixed, NEVER))._normalise_outcomes()

    def support(self, limit: int) -> tuple[Tensor, Tensor]:
        """Every sequence within one jump: `rows` (K,) in ascending order and `sequences` (K, L)."""
        possible = self.masked.unsqueeze(-1) & (self.log_x0.dense() > NEVER) & (self.log_move > NEVER).unsqueeze(-1)
        if int(possible.sum()) > limit:
            raise ValueError(
                f"{int(possible.sum())} jumps are more than the limit of {limit}: use a smaller vocabulary"
            )
        rows, site, token = possible.nonzero(as_tuple=True)
        y = self.x[rows]
        y[torch.arange(len(rows), device=rows.device), site] = token
        still = (~possible.flatten(1).any(-1)).nonzero().squeeze(-1)
        order = torch.cat([rows, still]).argsort(stable=True)
        return torch.cat([rows, still])[order], torch.cat([y, self.x[still]])[order]
