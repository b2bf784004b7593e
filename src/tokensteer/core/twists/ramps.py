"""Ramps: how much of the reward counts at time t. They are functions of t, or `Adaptive`.

An adaptive ramp raises lambda as fast as the effective sample size allows. At each step the next lambda is the largest
that keeps the conditional effective sample size at a given share of N,

    CESS(lambda) = (sum_i W_i v_i)² / sum_i W_i v_i²,    v_i = exp(psi_i(lambda) - psi_i(least)),

where W are the weights with as little of the new estimates counted as may be: no less than the step before under the
difference potential, whose lambda never falls; nothing under a potential that multiplies a new factor at each step.

In annealed samplers such a choice biases Z_hat, since the moves to come are for the lambda chosen. Here it does not:
lambda enters the twist alone, the number that a particle was weighed and resampled with is the number divided out at
its next step, and p stays what it was, so the weights telescope however the lambdas were chosen from what had been
seen. A proposal may aim with the lambda known when it draws, since its ratio p/q is counted. For the same reasons
particle Gibbs keeps its target. What it does cost: populations of one run follow different ramps, so that their
effective sample sizes on the way are not those of one sampler; and with few particles lambda is as noisy as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokensteer.core.numerics.domains import check_number, check_whole
from tokensteer.core.particles.resampling import weights

Ramp = Callable[[float], float]


def linear(t: float) -> float:
    """lambda = 1 - t."""
    return 1.0 - t


def constant(t: float) -> float:
    """lambda = 1: the reward counts in full from the start."""
    return 1.0


def end(t: float) -> float:
    """lambda = 0 until the end: only finished samples are judged."""
    return 1.0 if t == 0 else 0.0


def exponential(num_steps: int, base: float = 1.05) -> Ramp:
    """lambda = min(base^i - 1, 1) after i of `num_steps` equal steps."""
    check_whole("ramps.exponential: num_steps", num_steps)
    check_number("ramps.exponential: base", base, "(1, inf)")
    return lambda t: min(base ** ((1.0 - t) * num_steps) - 1.0, 1.0)


def clipped(k: float) -> Ramp:
    """lambda = min(1, (10/k)·(1 - t)): the full reward is reached after a fraction k/10 of the time."""
    check_number("ramps.clipped: k", k, "(0, 10]", "10 reaches the full reward at the end")
    return lambda t: min(1.0, 10.0 / k * (1.0 - t))


def conditional_ess(log_w: Tensor, log_v: Tensor) -> Tensor:
    """(sum W v)² / sum W v², in (0, 1], for log-weights log_w and increments log_v (B, N); 1 where all are dead."""
    w = weights(log_w)
    v = (log_v - torch.where(w > 0, log_v, -torch.inf).amax(-1, keepdim=True)).exp()
    return (w * v).sum(-1).square() / (w * v.square()).sum(-1)


@dataclass(frozen=True)
class Adaptive:
    """A ramp chosen by each population as it runs, `Tilt(..., ramp=Adaptive(0.9))`: 0 at the start, 1 at the end.

    `share` is the share of N that the conditional effective sample size keeps. The lambdas chosen are in `Result.ramp`.
    Proposals aim with the lambda of the step before, since the next is chosen from what they draw.
    """

    share: float = 0.9

    def __post_init__(self) -> None:
        check_number("Adaptive.share", self.share, "(0, 1)")

    def choose(self, log_w: Tensor, least: Tensor, log_twist: Callable[[Tensor], Tensor]) -> Tensor:
        """The largest lambda in [least, 1] with CESS at least `share`, (P,), the same for a whole population.

        log_w (B, N) counts no new twist yet; log_twist gives each particle's, (P,), at the lambdas (P,) it is asked.
        """

        def psi(ramp: Tensor) -> Tensor:
            return log_twist(ramp.repeat_interleave(log_w.shape[1])).double().view_as(log_w)

        low = least.double().view_as(log_w)[:, 0]
        high, before = torch.ones_like(low), psi(low)

        def enough(ramp: Tensor) -> Tensor:
            return conditional_ess(log_w + before, psi(ramp) - before) >= self.share

        whole = enough(high)
        for _ in range(40):
            middle = (low + high) / 2
            good = enough(middle)
            low, high = torch.where(good, middle, low), torch.where(good, high, middle)
        return torch.where(whole, 1.0, low).repeat_interleave(log_w.shape[1])
