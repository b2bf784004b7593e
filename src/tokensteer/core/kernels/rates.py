"""Rates and opening times of the process in continuous time, which the kernels discretise.

Sites change one at a time, at rates R_t(x, y) from x to its neighbour y, and time runs down from 1 to 0. A particle
that moves by rates Q instead of R collects weight between jumps and at jumps:

    log w = psi_s(x_s) - psi_t(x_t) + ∫ sum_y [Q(x, y) - R(x, y)] dt + sum over jumps of log R/Q

where the changes of psi by the ramp and by jumps telescope. If the targets pi_t are known, the noise in detailed
balance with Q gives a weight without a model, as in LEAPS (`balance_log_weight`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from tokensteer.core.kernels.schedule import Schedule
from tokensteer.core.numerics.draws import uniforms


def hazard(schedule: Schedule, t: float) -> float:
    """-alpha'(t) / (1 - alpha(t)), the rate at which a masked site opens."""
    return -schedule.derivative(t) / (1.0 - schedule.alpha(t))


def _each(function: Callable[[float], float], t: Tensor) -> Tensor:
    """function(t) at every element of t, in double precision."""
    values = [function(float(v)) for v in t.flatten().cpu().numpy()]
    return torch.tensor(values, dtype=torch.float64, device=t.device).view_as(t)


def _at(function: Callable[[float], float], t: Tensor | float, like: Tensor) -> Tensor:
    """function(t), for one t or one for each row, in a shape and dtype to multiply `like` (P, L, V) by."""
    return _each(function, torch.as_tensor(t, dtype=torch.float64)).view(-1, 1, 1).to(like)


def masked_rate(x: Tensor, log_x0: Tensor, t: Tensor | float, schedule: Schedule, mask_id: int) -> Tensor:
    """R_t(x -> x^{l:=v}) = -alpha'/(1 - alpha) · mu^l(v) at masked sites, 0 elsewhere: (P, L, V)."""
    mu = torch.where((x == mask_id).unsqueeze(-1), log_x0.exp(), 0.0)
    return _at(lambda v: hazard(schedule, v), t, mu) * mu


def uniform_rate(x: Tensor, log_x0: Tensor, t: Tensor | float, schedule: Schedule) -> Tensor:
    """The reverse of noise that replaces tokens by uniform ones, with marginals alpha·x_0 + (1 - alpha)/V.

    Noise replaces at rate -alpha'/alpha. Reversed given x_0^l and averaged over the prediction mu^l = p(x_0^l | x_t),
    which here depends on x^l too, with b = (1 - alpha)/V:

        R_t(x -> x^{l:=v}) = -alpha'/(alpha V) · [1 - mu^l(x^l)·alpha/(alpha + b) + mu^l(v)·alpha/b]     v != x^l
    """
    mu, size = log_x0.exp(), log_x0.shape[-1]
    alpha, slope = _at(schedule.alpha, t, mu), _at(schedule.derivative, t, mu)
    b = (1.0 - alpha) / size
    here = x.unsqueeze(-1)
    leave = 1.0 - mu.gather(-1, here) * alpha / (alpha + b)
    return (-slope / size * (leave / alpha + mu / b)).scatter(-1, here, 0.0)


def time_of(schedule: Schedule, noise: Tensor) -> Tensor:
    """The t with 1 - alpha(t) = noise, by bisection; 0 if the schedule has more noise than that at t = 0."""

    def solve(target: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if 1.0 - schedule.alpha(middle) >= target else (middle, high)
        return low

    return _each(solve, noise)


def opening_times(schedule: Schedule, masked: Tensor, generator: Generator | None, t: float = 1.0) -> Tensor:
    """Exact draws of the opening times, descending, (P, max n), of n masked sites (P,) at time t; 0 after the last.

    Sites open independently, so with n masked P(none opens before tau) = ((1 - alpha_tau)/(1 - alpha_t))^n = U.
    """
    left = masked.unsqueeze(-1) - torch.arange(int(masked.max()), device=masked.device)
    u = uniforms(tuple(left.shape), masked, generator)
    share = torch.where(left > 0, u ** (1.0 / left.clamp(min=1)), 0.0).cumprod(-1)
    return time_of(schedule, (1.0 - schedule.alpha(t)) * share).clamp(max=t)


def next_opening(schedule: Schedule, masked: Tensor, t: Tensor, generator: Generator | None) -> Tensor:
    """Exact draws of the next opening time after t (P,) of n masked sites (P,): `opening_times` one by one. It is t if
    no site is masked."""
    u = uniforms(tuple(masked.shape), masked, generator)
    noise = (1.0 - _each(schedule.alpha, t)) * u ** (1.0 / masked.clamp(min=1))
    return torch.where(masked > 0, time_of(schedule, noise).minimum(t), t)
