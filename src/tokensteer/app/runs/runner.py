"""The worker of a run: it runs units, and measures rows whose units are done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from tokensteer import files
from tokensteer.app.runs.auto import planned
from tokensteer.app.runs.constrained import own_reward
from tokensteer.app.runs.folder import PICTURE
from tokensteer.app.runs.jobs import Job
from tokensteer.app.runs.prepare import Environment, PreparedJob, one_by_one_prepared, put_together
from tokensteer.app.runs.prompts import one_by_one, only, side_by_side
from tokensteer.app.runs.rows import answer_of, row_of
from tokensteer.app.runs.units import Part, Unit, whole
from tokensteer.core.particles.gibbs import particle_gibbs
from tokensteer.core.particles.path import Record
from tokensteer.core.particles.result import Result
from tokensteer.tasks.common.task import Task
from tokensteer.workers.scatter import on_device
from tokensteer.workers.units import seed_of

STORED = 2
"""Populations whose states are stored with --keep-states, so that files stay small."""


class Watch(Protocol):
    """Observes the jobs of a run, such as a progress bar."""

    def begin(self, job: Job) -> None:
        """A unit of the job begins in this process."""
        ...

    def see(self, record: Record) -> None: ...

    def shares(self, shares: Sequence[float]) -> None:
        """How much is done of each unit that is under way in other processes, from 0 to 1."""
        ...

    def unit(self) -> None:
        """A unit is done."""
        ...

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


@dataclass(frozen=True)
class WholeRow:
    """A call: run a row that is one unit, and measure it."""

    row: int

    def __str__(self) -> str:
        return f"row {self.row}"


@dataclass(frozen=True)
class Measure:
    """A call: measure a row all of whose units are done."""

    row: int
    parts: Sequence[Part]

    def __str__(self) -> str:
        return f"measuring row {self.row}"


@dataclass(frozen=True)
class FinishedRow:
    """A row for the run folder: its entry in results.json, the start of its files' names, its result, and functions
    that write its samples to files, by suffix."""

    name: str
    entry: Mapping[str, Any]
    result: Result
    samples: Mapping[str, Callable[[Path], None]]


@dataclass
class RowWorker:
    """Runs units and measures rows; `prepared` gives jobs by number. With `sends` values can go to another machine:
    results are on the CPU, and samples are the contents of their files."""

    prepared: Callable[[int], PreparedJob]
    place: Environment
    watch: Watch
    sends: bool = False
    share: float = 0.0

    def __call__(self, call: Unit | WholeRow | Measure) -> Part | FinishedRow:
        self.share = 0.0
        match call:
            case Unit():
                return self._unit(call)
            case WholeRow():
                return self._whole_row(self.prepared(call.row))
            case Measure():
                return self._measured(call)

    def _see(self, ready: PreparedJob) -> Callable[[Record], None]:
        each = 1 / (len(ready.method.steering.steps) + 2)

        def see(record: Record) -> None:
            self.share = min(1.0, self.share + each)
            self.watch.see(record)

        self.watch.begin(ready.job)
        return see

    def _unit(self, unit: Unit) -> Part:
        """Run a unit. A prompt among several may fail without ending the run."""
        ready = self.prepared(unit.row)
        see, began = self._see(ready), time.perf_counter()
        try:
            task = ready.task if unit.prompt is None else only(ready.task, [unit.prompt])
            result = run_one(put_together(unit.job, task), self.place, see)
        except Exception as error:
            if unit.prompt is None:
                raise
            return Part(unit, None, time.perf_counter() - began, " ".join(str(error).split()))
        return Part(unit, on_device(result, "cpu"), _since(began))

    def _whole_row(self, ready: PreparedJob) -> FinishedRow:
        see, began = self._see(ready), time.perf_counter()
        if ready.recipe.planned:  # all prompts together: one alone would be run by another method, and without a budget
            ready = planned(ready, self.place)
            result = run_one(ready, self.place, see)
            return self._finished(ready, result, _since(began))
        try:
            result = run_one(ready, self.place, see)
        except Exception as error:
            ready, result = retry_per_prompt(ready, self.place, see, error)
        return self._finished(ready, result, _since(began))

    def _measured(self, call: Measure) -> FinishedRow:
        ready = self.prepared(call.row)
        result, failed = whole(call.parts)
        if failed and ready.task.prompted is not None:
            prompts = ready.task.prompted.prompts
            kept = [k for k in range(len(prompts)) if k not in failed]
            lost = [(prompts[k], reason) for k, reason in failed.items()]
            ready = put_together(ready.job, only(ready.task, kept, lost))
        noise = Generator(self.place.device).manual_seed(seed_of(ready.job.seed, f"{ready.job.label}/measured"))
        result = replace(on_device(result, self.place.device), generator=noise)
        return self._finished(ready, result, sum(part.seconds for part in call.parts))

    def _finished(self, ready: PreparedJob, result: Result, seconds: float) -> FinishedRow:
        answer, kept = answer_of(ready.recipe, result)
        row = row_of(ready, result, answer, kept, seconds)
        samples = _samples(ready, result, answer)
        if self.sends:
            result = on_device(result, "cpu")
            samples = {suffix: Content(files.content_of(write)) for suffix, write in samples.items()}
        return FinishedRow(ready.job.file, row, result, samples)


@dataclass(frozen=True)
class Content:
    """Writes the content of a file that another process has made."""

    content: bytes

    def __call__(self, file: Path) -> None:
        files.write_bytes(file, self.content)


def _since(began: float) -> float:
    """Seconds since a moment, when the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def remote_worker(jobs: Sequence[Job], place: Environment) -> RowWorker:
    """The worker of another process, which prepares the jobs it is given."""
    here = replace(place, cluster=False)  # raises if it lacks the device
    return RowWorker(one_by_one_prepared(jobs, here), here, Unwatched(), sends=True)


class Unwatched:
    """A watch that shows nothing."""

    def begin(self, job: Job) -> None: ...
    def see(self, record: Record) -> None: ...
    def shares(self, shares: Sequence[float]) -> None: ...
    def unit(self) -> None: ...
    def end(self, row: Mapping[str, Any]) -> None: ...


def _samples(ready: PreparedJob, result: Result, answer: Result) -> dict[str, Callable[[Path], None]]:
    """Functions that write the samples of a job to files, by suffix."""
    task, files = ready.task, dict[str, Callable[[Path], None]]()
    for suffix, write in task.written.items():
        files[suffix] = partial(write, result)
    if task.picture is not None and len(answer.log_w):
        files[PICTURE] = partial(task.picture, _pictured(ready, answer))
    return files


def _pictured(ready: PreparedJob, answer: Result) -> Tensor:
    """The draws (P, L) of a picture, equally many of each prompt if it has as many populations as the others."""
    task, populations = ready.task, len(answer.log_w)
    groups = 1 if task.prompted is None else len(task.prompted.prompts)
    groups = groups if populations % groups == 0 else 1
    drawn = answer.sample(max(1, min(ready.job.particles, task.pictured // populations)))
    share = max(1, task.pictured // groups)
    return drawn.view(groups, -1, drawn.shape[-1])[:, :share].flatten(0, 1)[: task.pictured]
