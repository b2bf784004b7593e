"""How many particles, or populations, fit into the time that is left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress

from torch import Generator

from tokensteer.core.particles.path import Record
from tokensteer.core.steering.methods import Method

FACTOR = 3  # each run is so many times as large as the one before it,
LEAP = 10  # or so many times if that one took hardly longer than the first
FLAT = 1.3  # times as long is hardly longer
NOISE = 0.1  # of the time: a run that takes less may have been held up


SHOWN = 0.2  # of the steps tell how long a run takes: triggers look ten times in a run, so two looks are among them


def most_within(seconds_of: Callable[[int], tuple[float, float]], seconds: float, first: int) -> tuple[int, float]:
    """How many fit into what is left of the seconds after finding out, and what finding out took. `seconds_of` tells
    how long a run of so many takes, and how long it took to know.

    A GPU takes as long for few particles as for one, however long that is. So numbers grow from `first` until a run
    takes twice as long as the first and not so little that it may be noise, or until a next one could use up half of
    the time. Let a run of n take s seconds, the last but one the slope of time between the two, at least s/(4n) for
    each. More than n take s/n for each if s has doubled since the first run, else the slope; fewer take the slope.
    """
    count, (took, spent) = first, seconds_of(first)
    shortest, slope, each = took, took / first, took / first
    while took < max(2 * shortest, NOISE * seconds):
        growths = (LEAP, FACTOR) if count > first and took < FLAT * shortest else (FACTOR,)
        known = (growth for growth in growths if spent + SHOWN * (took + each * count * (growth - 1)) < seconds / 2)
        growth = next(known, None)
        if growth is None:
            break
        before, fewer = took, count
        count *= growth
        took, more = seconds_of(count)
        spent, shortest = spent + more, min(shortest, took)  # the first run may have warmed a GPU up
        slope = max((took - before) / (count - fewer), took / count / 4)
        each = took / count if took >= 2 * shortest else slope
    rest = seconds - spent - took
    return max(1, int(count + rest / (each if rest > 0 else slope))), spent


class _Enough(Exception):  # noqa: N818, it is no error
    """The steps that were needed are over."""


def predicted_seconds(
    method: Method, num_particles: int, populations: int, generator: Generator | None = None
) -> tuple[float, float]:
    """How long a run takes, from a share of its steps, and how long those took. The first step is left out: all
    particles are alike there, and a network sees one of them."""
    steps = len(method.steering.steps)
    last = min(steps, 1 + math.ceil(SHOWN * steps))
    began = time.perf_counter()
    times: list[float] = []

    def watch(record: Record) -> None:
        record.log_w.cpu()  # waits for the device
        times.append(time.perf_counter())
        if len(times) > last:
            raise _Enough

    with suppress(_Enough):
        method(num_particles, populations, generator=generator, on_step=watch)
    each = (times[-1] - times[1]) / (len(times) - 2) if len(times) > 2 else times[-1] - times[0]
    return times[1] - began + each * (steps - 1), times[-1] - began
