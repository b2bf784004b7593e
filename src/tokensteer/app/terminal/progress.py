"""Progress of jobs: a bar with ESS and reward in a terminal, a line for each finished row elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tokensteer.app.runs.jobs import Job
from tokensteer.app.runs.runner import Watch
from tokensteer.app.terminal.tables import plain_console, summary
from tokensteer.core.particles.path import Record
from tokensteer.core.particles.resampling import ess

PERIOD = 1e9  # seconds that the estimate of the time that is left looks back: the whole run
PAUSE = 0.1  # seconds between two readings of the weights: on a GPU each makes the host wait


@contextmanager
def shown(jobs: int, done: int = 0) -> Generator[Watch, None, None]:
    """A watch for this many jobs, some of them `done`, on the standard error stream."""
    if not sys.stderr.isatty():
        yield Lines(jobs, done)
        return
    left = TimeRemainingColumn(), TextColumn("left", style="progress.remaining")
    columns = MofNCompleteColumn(), BarColumn(20), *left, TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=plain_console(stderr=True), transient=True, speed_estimate_period=PERIOD) as bar:
        yield Bars(bar, bar.add_task("", total=jobs, completed=done), bar.add_task("", total=1))


@dataclass
class Bars:
    """One bar for all jobs and one for the steps of the current job."""

    bar: Progress
    all: TaskID
    one: TaskID
    looked: float = 0.0
    each: float = 0.0
    """The share of the job in a step."""

    def begin(self, job: Job) -> None:
        self.bar.update(self.all, description=f"{job.task}: {job.label}, N = {job.particles}")
        steps = job.settings.steps
        self.bar.reset(self.one, total=None if steps is None else steps + 1, description="")
        self.each = 0.0 if steps is None else 1.0 / (steps + 2)

    def see(self, record: Record) -> None:
        self.bar.update(self.one, advance=1)
        self._advance(self.each)
        now = time.monotonic()
        if now - self.looked < PAUSE:
            return
        self.looked = now
        note = f"ESS/N {float(ess(record.log_w).mean()) / record.log_w.shape[1]:.2f}"
        if record.evaluation.reward is not None:
            note += f"  reward {float(record.evaluation.reward.mean()):.3f}"
        self.bar.update(self.one, description=note)

    def end(self, row: Mapping[str, Any]) -> None:
        self.bar.console.print(summary(row))
        self.bar.update(self.all, completed=int(self._done) + 1)

    @property
    def _done(self) -> float:
        """Jobs that are done, with the share of the current one."""
        return self.bar.tasks[self.bar.task_ids.index(self.all)].completed

    def _advance(self, share: float) -> None:
        """Count a share of the current job, which methods of several sweeps do not exceed."""
        if self._done + share < int(self._done) + 1:
            self.bar.update(self.all, advance=share)


@dataclass
class Lines:
    """A line for each finished row."""

    total: int
    done: int = 0

    def begin(self, job: Job) -> None: ...
    def see(self, record: Record) -> None: ...
    def end(self, row: Mapping[str, Any]) -> None:
        self.done += 1
        sys.stderr.write(f"{self.done}/{self.total} {summary(row)}\n")
        sys.stderr.flush()
