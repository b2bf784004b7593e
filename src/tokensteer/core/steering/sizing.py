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
NOISE = 0.05  # of the time: a run that takes less may have been held up


SHOWN = 0.2  # of the steps tell how long a run takes: triggers look ten times in a run, so two looks are among them


def most_within(
    seconds_of: Callable[[int], tuple[float, float]], seconds: float, first: int, share: float
) -> tuple[int, float]:
    """How many fit into what is left of the seconds after finding out, and what finding out took. `seconds_of` tells
    how long a run of so many takes, and how long it took to know.

    A GPU takes as long for few particles as for one. So numbers grow from `first` until a run takes a `share` of the
    time, or twice as long as the first and not so little that it may be noise, or half of the time is gone. From there
    on time is proportional.
    """
    count = first
    took, spent = seconds_of(first)
    shortest = took
    while took < share * seconds and took < max(2 * shortest, NOISE * seconds) and spent + SHOWN * took < seconds / 2:
        count *= LEAP if count > first and took < FLAT * shortest else FACTOR
        took, more = seconds_of(count)
        spent += more
    return max(1, int(count * (seconds - spent) / took)), spent


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
