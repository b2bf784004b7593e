"""Adaptive ramps: let the reward in as fast as the particles can bear.

At each step the next lambda is the largest that keeps the conditional effective sample size at a given share of N,

    CESS(lambda) = (sum_i W_i v_i)² / sum_i W_i v_i²,    v_i = exp((lambda - lambda_before) · r_hat_i / kl),

where W are the weights with the reward counted as before. In annealed samplers such a choice biases Z_hat, since the
moves depend on it. Here it does not: lambda enters the twist alone, a particle's own twist is divided out again at its
next step, and p stays what it was, so the weights telescope whatever the lambdas were and however they were chosen.
`adapted_ramp` adapts in a pilot run and freezes the choice, for runs that are to share one ramp.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor

from tokensteer.core.resample import weights
from tokensteer.core.schedule import Ramp, Step, constant_ramp
from tokensteer.core.smc import Evaluation, smc
from tokensteer.core.steering import Steering
from tokensteer.core.twist import difference


def conditional_ess(log_w: Tensor, log_v: Tensor) -> Tensor:
    """(sum W v)² / sum W v², in (0, 1], for log-weights log_w and increments log_v (B, N); 1 where all are dead."""
    w = weights(log_w)
    v = (log_v - torch.where(w > 0, log_v, -torch.inf).amax(-1, keepdim=True)).exp()
    return (w * v).sum(-1).square() / (w * v.square()).sum(-1)


def next_lambda(log_w: Tensor, r: Tensor, before: Tensor, share: float) -> Tensor:
    """The largest lambda in [before, 1] with CESS at least `share`, (B,). log_w counts no reward yet, r is r_hat/kl."""
    counted = log_w + before.unsqueeze(-1) * r
    low, high = before, torch.ones_like(before)
    for _ in range(40):
        middle = (low + high) / 2
        enough = conditional_ess(counted, (middle - before).unsqueeze(-1) * r) >= share
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    whole = conditional_ess(counted, (1 - before).unsqueeze(-1) * r) >= share
    return torch.where(whole, 1.0, low)


@dataclass
class AdaptiveRamp:
    """A steering whose ramp adapts to each population as it runs; its own ramp is not used.

    `lambdas` keeps what the last run chose: time -> (B,). The gradient proposal follows with the lambda of the step
    before.
    """

    steering: Steering
    share: float = 0.9
    lambdas: dict[float, Tensor] = field(default_factory=dict[float, Tensor], init=False, repr=False)
    _full: Steering = field(init=False, repr=False)

    def __post_init__(self) -> None:
        twist = self.steering.twist
        if twist is None or twist.potential is not difference:
            raise ValueError("an adaptive ramp needs a Tilt with the difference potential: there is nothing to let in")
        if not 0 < self.share < 1:
            raise ValueError(f"AdaptiveRamp: share must lie in (0, 1), got {self.share}")
        self._full = replace(self.steering, twist=replace(twist, ramp=constant_ramp))

    @property
    def steps(self) -> Sequence[Step]:
        return self._full.steps

    def start(self, rows: int, generator: Generator | None) -> Tensor:
        self.lambdas.clear()
        return self._full.start(rows, generator)

    @property
    def populations(self) -> int:
        return self._full.populations

    def spent(self) -> Mapping[str, tuple[int, int]]:
        return self._full.spent()

    def move(self, x: Tensor, evaluation: Evaluation, step: Step, generator: Generator | None) -> tuple[Tensor, Tensor]:
        return self._full.move(x, evaluation, step, generator)

    def evaluate(
        self,
        x: Tensor,
        t: float,
        generator: Generator | None,
        parent: Evaluation | None = None,
        weighed: bool = True,
    ) -> Evaluation:
        evaluation = self._full.evaluate(x, t, generator, parent)
        if t == 0:
            return evaluation
        r = evaluation.log_twist.double()
        if parent is None or parent.pending is None or parent.carry is None:
            chosen = torch.zeros_like(r)  # nothing counts at the start
        else:
            chosen = self._choose(parent.pending, r, parent.carry, t)
        gradient = evaluation.gradient
        if gradient is not None:
            gradient = gradient * chosen.to(gradient.dtype).view(-1, 1, 1)
        return replace(evaluation, log_twist=chosen * r, gradient=gradient, carry=chosen)

    def _choose(self, pending: Tensor, r: Tensor, before: Tensor, t: float) -> Tensor:
        """The next lambda of each population, for each of its particles, (P,)."""
        chosen = next_lambda(pending, r.view_as(pending), before.view_as(pending)[:, 0], self.share)
        self.lambdas[t] = chosen
        return chosen.repeat_interleave(pending.shape[1])


def adapted_ramp(
    steering: Steering,
    num_particles: int,
    populations: int = 1,
    *,
    share: float = 0.9,
    generator: Generator | None = None,
) -> Ramp:
    """A ramp chosen by a pilot run and then fixed: the median over populations at each time, linear in between."""
    pilot = AdaptiveRamp(steering, share)
    smc(pilot, num_particles, populations, generator=generator)
    times = [0.0, *sorted(pilot.lambdas), pilot.steps[0].t]
    values = [1.0, *(float(pilot.lambdas[t].median()) for t in times[1:-1]), 0.0]

    def ramp(t: float) -> float:
        after = min(max(bisect.bisect_left(times, t), 1), len(times) - 1)
        low, high = times[after - 1], times[after]
        return values[after - 1] + (values[after] - values[after - 1]) * (t - low) / (high - low)

    return ramp
