"""A ramp from a pilot run: adapt once, freeze the choice, and let all later runs share it."""

from __future__ import annotations

import bisect
from dataclasses import replace

from torch import Generator

from tokensteer.core.adaptive import Adaptive
from tokensteer.core.schedule import Ramp
from tokensteer.core.smc import smc
from tokensteer.core.steering import Steering


def adapted_ramp(
    steering: Steering,
    num_particles: int,
    populations: int = 1,
    *,
    share: float = 0.9,
    generator: Generator | None = None,
) -> Ramp:
    """A ramp chosen by a pilot run and then fixed: the median over populations at each time, linear in between."""
    if steering.twist is None:
        raise ValueError("adapted_ramp: the steering has no Tilt, so there is no reward to let in")
    pilot = replace(steering, twist=replace(steering.twist, ramp=Adaptive(share)))
    chosen = smc(pilot, num_particles, populations, generator=generator).ramp
    assert chosen is not None, "a ramp that adapts is recorded"
    times = [0.0, *(step.t for step in reversed(steering.steps))]
    values = [float(value) for value in chosen.median(-1).values.flip(0)]

    def ramp(t: float) -> float:
        after = min(max(bisect.bisect_left(times, t), 1), len(times) - 1)
        low, high = times[after - 1], times[after]
        return values[after - 1] + (values[after] - values[after - 1]) * (t - low) / (high - low)

    return ramp
