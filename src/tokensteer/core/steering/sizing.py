"""How many particles, or populations, fit into an amount of time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

FACTOR = 3  # each run is so many times as large as the one before it


class Fit(NamedTuple):
    """How many fit, what the runs that found it took, and in words how it was found."""

    fits: int
    spent: float
    why: str


def most_within(
    seconds_of: Callable[[int], float], seconds: float, first: int, share: float, *, paid: bool = False
) -> Fit:
    """The largest count, at least one, whose run takes so many seconds, if seconds_of(n) is what n take.

    Runs grow from `first` until one takes a `share` of the time, because a GPU takes as long for few as for one. The
    last two runs give the time of one apart from what every run takes, at least a quarter of the mean. With `paid` the
    time of these runs is part of the seconds.
    """
    few, more = first, FACTOR * first
    took, longer = seconds_of(few), seconds_of(more)
    spent = took + longer
    while longer < share * (seconds - spent * paid):
        few, more, took = more, FACTOR * more, longer
        longer = seconds_of(more)
        spent += longer
    each = max((longer - took) / (more - few), longer / more / 4)
    count = max(1, int(more + (seconds - spent * paid - longer) / each))
    return Fit(count, spent, f"{few:,} took {took:.3g} s and {more:,} took {longer:.3g} s")
