"""Methods at equal time: each gets as many particles as it moves within a number of seconds, by short runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch

from tokensteer.app.runs.jobs import Job
from tokensteer.app.runs.prepare import Environment, PreparedJob, prepare, put_together
from tokensteer.app.runs.recipes import recipe_of
from tokensteer.app.runs.runner import run_one
from tokensteer.core.steering.pilots import Budget

FIRST, FACTOR = 4, 3
"""Particles of the first run on a device, one on a CPU, and how many times as many each run has as the one before."""
SHARE = 0.25
"""Runs grow until one takes this share of the time: few particles take a GPU no longer than one."""


def within(jobs: Sequence[Job], budget: str, place: Environment) -> list[Job]:
    """The jobs with as many particles, at least one, as the time allows; a method that pilots plan gets the budget.
    Jobs that differ only in their seed are timed once and get equally many particles."""
    whole = Budget.of(budget)
    if whole.unit != "s":
        raise ValueError(f"--budget must be a time here, such as 30s, got {budget}: for rows there is --match-rows")

    alike = [replace(job, particles=FIRST, seed=jobs[0].seed) for job in jobs]
    tasks = {one.job: one.task for one in prepare(alike, place)}

    @cache
    def counted(job: Job) -> tuple[int, str]:
        def seconds_of(count: int) -> float:
            return _seconds(put_together(replace(job, particles=count), tasks[job]), place)

        if place.device != "cpu":
            warm_up(job)
            return particles(seconds_of, whole.amount)
        return particles(seconds_of, whole.amount, 2 if recipe_of(job.method).sweeps else 1)

    @cache
    def warm_up(job: Job) -> None:
        """A device loads its kernels once, which is not the time of a method."""
        _seconds(put_together(replace(job, populations=1), tasks[job]), place)

    found: list[Job] = []
    for job, unseeded in zip(jobs, alike, strict=True):
        named = replace(job, extra=(*job.extra, budget))
        if recipe_of(job.method).planned:
            if place.device != "cpu":
                warm_up(unseeded)
            found.append(replace(named, budget=budget))
            continue
        count, why = counted(unseeded)
        found.append(replace(named, particles=count, why=f"{why}; the time is {budget}"))
    return found


def particles(seconds_of: Callable[[int], float], seconds: float, fewest: int | None = None) -> tuple[int, str]:
    """How many particles fit into a time, and why, if seconds_of(n) is what n take. The last two runs give the time of
    a particle apart from what every run takes, at least a quarter of the mean over particles. Where time is in
    proportion to particles, as on a CPU, the `fewest` are given: then two runs that take longer than the time are not
    begun."""
    few = FIRST if fewest is None else fewest
    more, took = FACTOR * few, seconds_of(few)
    if fewest is not None and (1 + FACTOR) * took > seconds:
        count = max(fewest, int(few * seconds / took))
        return count, f"{count:,}: {few:,} took {took:.3g} s"
    longer = seconds_of(more)
    while longer < SHARE * seconds:
        few, more, took = more, FACTOR * more, longer
        longer = seconds_of(more)
    each = max((longer - took) / (more - few), longer / more / 4)
    count = max(fewest or 1, int(more + (seconds - longer) / each))
    return count, f"{count:,}: {few:,} took {took:.3g} s and {more:,} took {longer:.3g} s"


def _seconds(ready: PreparedJob, place: Environment) -> float:
    began = time.perf_counter()
    run_one(ready, place, lambda record: None)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began
