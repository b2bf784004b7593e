"""Running jobs one after the other, each written to the run folder when it is done."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Generator

import tokensteer
from tokensteer.app.runs.auto import planned
from tokensteer.app.runs.constrained import own_reward
from tokensteer.app.runs.folder import FORMAT, PICTURE, Writer
from tokensteer.app.runs.jobs import Job
from tokensteer.app.runs.prepare import Environment, PreparedJob, put_together
from tokensteer.app.runs.prompts import one_by_one, only, side_by_side
from tokensteer.app.runs.resume import inputs
from tokensteer.app.runs.rows import answer_of, row_of
from tokensteer.app.words.environment import versions
from tokensteer.core.particles.gibbs import particle_gibbs
from tokensteer.core.particles.path import Record
from tokensteer.core.particles.result import Result
from tokensteer.tasks.common.task import SHIPPED, Task

STORED = 2
"""Populations whose states are stored with --keep-states, so that files stay small."""


class Watch(Protocol):
    """Observes the jobs of a run, such as a progress bar."""

    def begin(self, job: Job) -> None: ...
    def see(self, record: Record) -> None: ...
    def end(self, row: Mapping[str, Any]) -> None: ...


def run_one(ready: PreparedJob, place: Environment, watch: Callable[[Record], None]) -> Result:
    job, method = ready.job, ready.method
    steering, generator = method.steering, Generator(place.device).manual_seed(job.seed)
    populations = job.populations * steering.resources.templates  # a template for each prompt
    sweeps, split, when = ready.recipe.sweeps, ready.recipe.split, method.when
    keep = STORED if job.keep_states else False
    with steering.resources.limited(place.memory):
        if sweeps:
            sizes = (sweeps, job.particles, populations)
            return particle_gibbs(steering, *sizes, when=when, generator=generator, keep_states=keep).result
        if split is not None:
            return split(steering, job.particles, job.populations, generator=generator)
    noise, memory = generator, place.memory
    result = method(job.particles, populations, generator=noise, memory=memory, on_step=watch, keep_states=keep)
    return own_reward(method, result)


def retry_per_prompt(
    ready: PreparedJob, place: Environment, watch: Callable[[Record], None], error: Exception
) -> tuple[PreparedJob, Result]:
    """Run the prompts of a job one by one after an error: the job without the prompts that fail, and its result."""

    def run(k: int, alone: Task) -> Result:
        job = replace(ready.job, seed=(ready.job.seed + k) % 2**63)
        return run_one(put_together(job, alone), place, watch)

    done, failed = one_by_one(ready.task, run, error)
    return put_together(ready.job, only(ready.task, list(done), failed)), side_by_side(list(done.values()))


def run_all(jobs: Sequence[PreparedJob], place: Environment, writer: Writer, watch: Watch) -> None:
    """Run, measure and write one job after the other."""
    for ready in jobs:
        watch.begin(ready.job)
        began = time.perf_counter()
        try:
            ready = planned(ready, place) if ready.recipe.planned else ready
            result = run_one(ready, place, watch.see)
        except Exception as error:
            ready, result = retry_per_prompt(ready, place, watch.see, error)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        answer, kept = answer_of(ready.recipe, result)
        row = row_of(ready, result, answer, kept, seconds)
        writer.add(ready.job.file, row, result, _samples(ready, result, answer))
        watch.end(row)


def _samples(ready: PreparedJob, result: Result, answer: Result) -> dict[str, Callable[[Path], None]]:
    """Functions that write the samples of a job to files, by suffix."""
    task, files = ready.task, dict[str, Callable[[Path], None]]()
    for suffix, write in task.written.items():
        files[suffix] = partial(write, result)
    if task.picture is not None and len(answer.log_w):
        count = max(1, min(ready.job.particles, task.pictured // len(answer.log_w)))
        files[PICTURE] = partial(task.picture, answer.sample(count).flatten(0, 1)[: task.pictured])
    return files


def config(
    command: str, jobs: Sequence[Job], place: Environment, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Everything needed to run it again. `options` are those of the command that decide the results."""
    return {
        "format": FORMAT,
        "version": tokensteer.__version__,
        "command": command,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "weights": "shipped" if place.weights == SHIPPED else str(place.weights),
        "device": place.device,
        **({} if place.memory is None else {"memory": place.memory}),
        "machine": torch.cuda.get_device_name(place.device) if place.device.startswith("cuda") else platform.machine(),
        "versions": versions(),
        "inputs": inputs(jobs, place),
        **({} if options is None else {"options": dict(options)}),
        "jobs": [job.stored() for job in jobs],
    }
