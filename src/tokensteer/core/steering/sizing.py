"""How many particles, or populations, fit into the time that is left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress

from torch import Generator

from tokensteer.core.particles.path import Record
from tokensteer.core.steering.methods import Method

FLAT = 1.3  # times the shortest run: one that takes less is hardly longer
GROWN = 2  # times the shortest run: from there on time is in proportion to particles
LEAP = 10  # the next run has up to so many times the particles while time is flat,
FACTOR = 3  # and so many times at first and where time begins to grow
FILLED = 0.75  # of the time that is left is what a run may take that only tells how long it takes
NOISE = 0.1  # of the time: a run that takes less may have been held up
APART = 2  # steps at the start that are not like the others
SHOWN = 0.2  # of the steps tell how long a run takes: triggers look ten times in a run, so two looks are among them


def most_within(seconds_of: Callable[[int], tuple[float, float]], seconds: float, first: int) -> tuple[int, float]:
    """How many fit into what is left of the seconds after finding out, and what finding out took. `seconds_of` tells
    how long a run of so many takes, and how long it took to know.

    A GPU takes as long for few particles as for one, however long that is. So numbers grow from `first`, to what may
    nearly fit, until a run takes twice as long as the shortest and not so little that it may be noise, or until finding
    out could use up half of the time. Let a run of n take s seconds, and the last two give the slope of time, at least
    s/(4n) for each. More than n take s/n for each if s has doubled, else the slope; fewer take the slope.
    """
    count, (took, spent) = first, seconds_of(first)
    shortest, slope, each = took, took / first, took / first
    while took < max(GROWN * shortest, NOISE * seconds):
        growth = FACTOR  # so far no slope is known
        if count > first:
            growth = min(
                LEAP if took < FLAT * shortest else FACTOR, 1 + (FILLED * (seconds - spent) - took) / (each * count)
            )
        if growth < FACTOR or spent + SHOWN * (took + each * count * (growth - 1)) > seconds / 2:
            break
        before, fewer = took, count
        count = int(growth * count)
        took, more = seconds_of(count)
        spent, shortest = spent + more, min(shortest, took)  # the first run may have warmed a GPU up
        slope = max((took - before) / (count - fewer), took / count / 4)
        each = took / count if took >= GROWN * shortest else slope
    rest = seconds - spent - took
    return max(1, int(count + rest / (each if rest > 0 else slope))), spent


class _Enough(Exception):  # noqa: N818, it is no error
    """The steps that were needed are over."""


def predicted_seconds(
    method: Method, num_particles: int, populations: int, generator: Generator | None = None
) -> tuple[float, float]:
    """How long a run takes, from a share of its steps, and how long those took. The second half of them tells how long
    each step takes: at first all particles are alike, so that a network computes one of them, and a device may load
    kernels, those of the first look at the weights among them."""
    steps = len(method.steering.steps)
    apart = min(APART, steps - 1)
    last = min(steps, apart + math.ceil(SHOWN * steps))
    half = (apart + last) // 2
    began = time.perf_counter()
    times: list[float] = []

    def watch(record: Record) -> None:
        record.log_w.cpu()  # waits for the device
        times.append(time.perf_counter())
        if len(times) > last:
            raise _Enough

    with suppress(_Enough):
        method(num_particles, populations, generator=generator, on_step=watch)
    each = (times[-1] - times[half]) / (len(times) - 1 - half)
    return times[0] - began + each * steps, times[-1] - began
