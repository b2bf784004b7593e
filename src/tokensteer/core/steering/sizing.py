"""How many particles, or populations, fit into the time that is left."""

from __future__ import annotations

from collections.abc import Callable

FACTOR = 3  # each run is so many times as large as the one before it,
LEAP = 10  # or so many times if that one took hardly longer than the first
FLAT = 1.3  # times as long is hardly longer
NOISE = 0.05  # of the time: a run that takes less may have been held up


def most_within(seconds_of: Callable[[int], float], seconds: float, first: int, share: float) -> tuple[int, float]:
    """How many fit into what is left of the seconds after the runs that find out, and what those runs took.

    A GPU takes as long for few particles as for one. So runs grow from `first` until one takes a `share` of the time,
    or twice as long as the first and not so little that it may be noise, or half of the time is gone. From there on
    time is proportional.
    """
    count, shortest = first, seconds_of(first)
    took = spent = shortest
    while took < share * seconds and took < max(2 * shortest, NOISE * seconds) and spent + took < seconds / 2:
        count *= LEAP if count > first and took < FLAT * shortest else FACTOR
        took = seconds_of(count)
        spent += took
    return max(1, int(count * (seconds - spent) / took)), spent
