"""Methods at equal time: each gets as many particles as it moves within a number of seconds, by two short runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from tokensteer.app.runs.jobs import Job
from tokensteer.app.runs.prepare import Environment, PreparedJob, prepare
from tokensteer.app.runs.recipes import recipe_of
from tokensteer.app.runs.runner import run_one
from tokensteer.core.steering.pilots import Budget

TRIED = (4, 12)
"""Particles of the two runs. Their difference is the time of a particle without what every run takes."""


def within(jobs: Sequence[Job], budget: str, place: Environment) -> list[Job]:
    """The jobs with as many particles, at least one, as the time allows; a method that pilots plan gets the budget."""
    whole = Budget.of(budget)
    if whole.unit != "s":
        raise ValueError(f"--budget must be a time here, such as 30s, got {budget}: for rows there is --match-rows")
    found: list[Job] = []
    for job in jobs:
        job = replace(job, extra=(*job.extra, budget))
        if recipe_of(job.method).planned:
            found.append(replace(job, budget=budget))
            continue
        few, more = (_seconds(ready, place) for ready in prepare([replace(job, particles=n) for n in TRIED], place))
        each = max((more - few) / (TRIED[1] - TRIED[0]), 1e-6)
        found.append(replace(job, particles=max(1, int(TRIED[0] + (whole.amount - few) / each))))
    return found


def _seconds(ready: PreparedJob, place: Environment) -> float:
    began = time.perf_counter()
    run_one(ready, place, lambda record: None)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began
