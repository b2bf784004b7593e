"""Jobs played one after the other: prepared all before the first is run, each written down when it is done."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator

import tokensteer
from tokensteer.app import methods
from tokensteer.app.doctor import versions
from tokensteer.app.jobs import Job
from tokensteer.app.methods import Recipe
from tokensteer.app.names import choose
from tokensteer.app.progress import Watch
from tokensteer.app.runs import FORMAT, PICTURE, Writer
from tokensteer.core.chunks import parse_memory
from tokensteer.core.gibbs import particle_gibbs
from tokensteer.core.smc import Record, Result, summarise, sweep, with_rows
from tokensteer.core.steering import Method
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.metrics import Measured
from tokensteer.tasks.task import SHIPPED, Setup, Task, Trained


@dataclass(frozen=True)
class Place:
    """Where jobs are played, which should not change what they find."""

    weights: Path = SHIPPED
    device: str = "cpu"
    memory: str | None = None

    def __post_init__(self) -> None:
        if self.memory is not None:
            parse_memory(self.memory)


@dataclass(frozen=True)
class Ready:
    """A job with its parts put together."""

    job: Job
    task: Task
    recipe: Recipe
    method: Method


def prepare(jobs: Sequence[Job], place: Place) -> list[Ready]:
    """Put all parts together, so that what cannot work is said before anything is run."""
    make = cache(make_task)  # jobs of the same task share it
    return [put_together(job, make(setup_of(job, place), job.task)) for job in jobs]


def make_task(setup: Setup, name: str) -> Task:
    return choose(name, TASKS, "task")(setup)


def setup_of(job: Job, place: Place) -> Setup:
    choose(job.task, TASKS, "task")
    return Setup(job.steps, job.goal, job.kl, job.remask, place.device, place.weights)


def put_together(job: Job, task: Task) -> Ready:
    recipe = methods.recipe_of(job.method)
    method = recipe.make(task, methods.tilted(task, job.draws, job.ramp), job.particles)
    if job.trigger is not None:
        method = replace(method, when=methods.trigger(job.trigger))
    if recipe.sweeps and job.particles < 2:
        raise ValueError(f"{job.method} needs at least two particles, one of them pinned: got {job.particles}")
    return Ready(job, task, recipe, method)


# ---- one job


def perform(ready: Ready, place: Place, watch: Callable[[Record], None]) -> Result:
    job, method = ready.job, ready.method
    steering, generator = method.steering, Generator(place.device).manual_seed(job.seed)
    before = steering.spent()
    steering.limit(None if place.memory is None else parse_memory(place.memory))
    if ready.recipe.sweeps:
        run = particle_gibbs(
            steering, ready.recipe.sweeps, job.particles, job.populations, when=method.when, generator=generator
        )
        return run.result
    if ready.recipe.split is not None:
        return ready.recipe.split(steering, job.particles, job.populations, generator=generator)

    def watched(record: Record) -> Record:
        watch(record)
        return record

    records = sweep(
        steering, job.particles, job.populations, resample=method.resample, when=method.when, generator=generator
    )
    return with_rows(summarise(map(watched, records), generator), before, steering.spent())


def row_of(ready: Ready, result: Result, answer: Result, seconds: float) -> dict[str, Any]:
    """What is said of a job that is done: `metrics` of its answer, and apart from them of the best by reward."""
    job, recipe = ready.job, ready.recipe
    # Without a twist there is no normaliser to estimate, and a pinned particle makes the estimate a biased one.
    estimates = ready.method.steering.twist is not None and not recipe.sweeps and recipe.estimates
    log_z = Measured(*result.pooled_log_z) if estimates else Measured(math.nan, math.nan)
    return {
        "task": job.task,
        "method": job.label,
        "particles": job.particles,
        "populations": job.populations,
        "seed": job.seed,
        "about": ready.task.about,
        "answer": recipe.answer.__name__,
        "metrics": _numbers(ready.task.metrics(answer)),
        "best": None if result.reward is None else _numbers(ready.task.metrics(methods.best(result))),
        "log_z": _number(log_z.mean),
        "log_z_error": _number(log_z.error),
        "rows": dict(result.rows),
        "saved": dict(result.saved),
        "seconds": round(seconds, 3),
        "job": asdict(job),
    } | ({"training": _training(recipe.trained(ready.task))} if recipe.trained is not None else {})


def _training(trained: Trained) -> dict[str, Any]:
    """What it had taken to learn, and how that went."""
    card = trained.card
    return {name: card[name] for name in ("denoiser rows", "seconds", "device", "history")}


def _number(value: float) -> float | None:
    """For JSON, which knows no NaN."""
    return value if math.isfinite(value) else None


def _numbers(found: Mapping[str, Measured]) -> dict[str, list[float | None]]:
    return {name: [_number(value.mean), _number(value.error)] for name, value in found.items()}


# ---- all of them


def play(jobs: Sequence[Ready], place: Place, writer: Writer, watch: Watch) -> None:
    """Run, measure and write down one job after the other."""
    for ready in jobs:
        watch.begin(ready.job)
        began = time.perf_counter()
        result = perform(ready, place, watch.see)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        answer = ready.recipe.answer(result)
        row = row_of(ready, result, answer, seconds)
        writer.add(ready.job.file, row, result, _samples(ready, result, answer))
        watch.end(row)


def _samples(ready: Ready, result: Result, answer: Result) -> dict[str, Callable[[Path], None]]:
    """How the samples of a job are written for people, by the suffix of the file."""
    task = ready.task
    files: dict[str, Callable[[Path], None]] = {
        suffix: partial(write, result) for suffix, write in task.written.items()
    }
    count = max(1, min(ready.job.particles, task.pictured // ready.job.populations))
    files[PICTURE] = partial(task.picture, answer.sample(count).flatten(0, 1)[: task.pictured])
    return files


def config(command: str, jobs: Sequence[Job], place: Place) -> dict[str, Any]:
    """All that it takes to run it again."""
    shipped = place.weights == SHIPPED
    return {
        "format": FORMAT,
        "version": tokensteer.__version__,
        "command": command,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "weights": "shipped" if shipped else str(place.weights),
        "device": place.device,
        "memory": place.memory,
        "machine": torch.cuda.get_device_name() if place.device.startswith("cuda") else platform.machine(),
        "versions": versions(),
        "jobs": [asdict(job) for job in jobs],
    }
