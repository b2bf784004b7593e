"""Ramps: the share lambda(t) of the reward that counts at time t, a function of t or `Adaptive`.

An adaptive ramp takes at each step the largest lambda that keeps the conditional effective sample size (Zhou et al.,
2016; docs/references.md) at a given share of N,

    CESS(lambda) = (sum_i W_i v_i)² / sum_i W_i v_i²,    v_i = exp(psi_i(lambda) - psi_i(least)),

where W are the weights at `least`: the lambda of the step before under the difference potential, whose lambda never
falls; 0 under a potential that multiplies a new factor at each step.

In annealed samplers this choice biases Z_hat. Here lambda enters the twist alone, which is divided out at the next
step, and p does not depend on it, so the weights telescope whatever lambdas were chosen from the past. Proposals may
use the last lambda, since p/q is counted, and particle Gibbs keeps its target. The price: populations of one run follow
different ramps, so their ESS before the end is not that of one sampler, and with few particles lambda is noisy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokensteer.core.numerics.domains import check_number, check_whole
from tokensteer.core.particles.resampling import weights

Ramp = Callable[[float], float]
"""The share of the reward that counts at time t, with ramp(0) = 1."""


def linear(t: float) -> float:
    """lambda = 1 - t."""
    return 1.0 - t


def constant(t: float) -> float:
    """lambda = 1: the reward counts in full from the start."""
    return 1.0


def end(t: float) -> float:
    """lambda = 0 until the end: only finished samples are weighted."""
    return 1.0 if t == 0 else 0.0


def exponential(num_steps: int, base: float = 1.05) -> Ramp:
    """lambda = min(base^i - 1, 1) after i of `num_steps` equal steps (Ou et al., 2026)."""
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
    """A ramp chosen by each population during the run, 0 at the start and 1 at the end; `Result.ramp` has the lambdas.

    `share` is the share of N that the conditional effective sample size keeps. Proposals use the lambda of the step
    before, since the next depends on their draws.
    """

    share: float = 0.9

    def __post_init__(self) -> None:
        check_number("Adaptive.share", self.share, "(0, 1)")

    def choose(self, log_w: Tensor, least: Tensor, log_twist: Callable[[Tensor], Tensor]) -> Tensor:
        """The largest lambda in [least, 1] with CESS at least `share`, (P,), the same for a whole population.

        log_w (B, N) are without the new twist; log_twist maps lambdas (P,) to log-twists (P,).
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
