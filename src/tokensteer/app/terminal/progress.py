"""Progress of jobs: a bar with ESS and reward in a terminal, a line for each finished row elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tokensteer.app.runs.jobs import Job
from tokensteer.app.runs.runner import Unwatched, Watch
from tokensteer.app.terminal.tables import plain_console, summary
from tokensteer.core.particles.path import Record
from tokensteer.core.particles.resampling import ess

PERIOD = 1e9  # seconds that the estimate of the time that is left looks back: the whole run
PAUSE = 0.1  # seconds between two readings of the weights: on a GPU each makes the host wait


@contextmanager
def shown(rows: int, done: int, units: int, units_done: int) -> Generator[Watch, None, None]:
    """A watch for so many rows and units, some of them done, on the standard error stream."""
    if not sys.stderr.isatty():
        yield Lines(rows, done)
        return
    left = TimeRemainingColumn(), TextColumn("left", style="progress.remaining")
    columns = MofNCompleteColumn(), BarColumn(20), *left, TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=plain_console(stderr=True), transient=True, speed_estimate_period=PERIOD) as bar:
        yield Bars(bar, bar.add_task("", total=units, completed=units_done), bar.add_task("", total=1), units_done)


@dataclass
class Bars:
    """One bar for all units and one for the steps of the current unit. If other processes run units, all of them are in
    the first, and the second is hidden."""

    bar: Progress
    all: TaskID
    one: TaskID
    done: int = 0
    """Units."""
    share: float = 0.0
    """Of the current unit."""
    each: float = 0.0
    """The share of a unit in a step."""
    looked: float = 0.0

    def begin(self, job: Job) -> None:
        self.bar.update(self.all, description=f"{job.task}: {job.label}, N = {job.particles}")
        steps = job.settings.steps
        self.bar.reset(self.one, total=None if steps is None else steps + 1, description="")
        self.share, self.each = 0.0, 0.0 if steps is None else 1.0 / (steps + 2)

    def see(self, record: Record) -> None:
        self.bar.update(self.one, advance=1)
        if self.share + 1.5 * self.each < 1:  # methods of several sweeps have more steps
            self.share += self.each
            self._count(self.share)
        now = time.monotonic()
        if now - self.looked < PAUSE:
            return
        self.looked = now
        note = f"ESS/N {float(ess(record.log_w).mean()) / record.log_w.shape[1]:.2f}"
        if record.evaluation.reward is not None:
            note += f"  reward {float(record.evaluation.reward.mean()):.3f}"
        self.bar.update(self.one, description=note)

    def shares(self, shares: Sequence[float]) -> None:
        busy = f"{len(shares)} worker{'' if len(shares) == 1 else 's'} at work"
        self.bar.update(self.all, description=busy)
        self.bar.update(self.one, visible=False)
        self._count(sum(min(share, 0.999) for share in shares))

    def unit(self) -> None:
        self.done, self.share = self.done + 1, 0.0
        self._count(0.0)

    def end(self, row: Mapping[str, Any]) -> None:
        self.bar.console.print(summary(row))

    def _count(self, under_way: float) -> None:
        self.bar.update(self.all, completed=self.done + under_way)


@dataclass
class Lines(Unwatched):
    """A line for each finished row."""

    total: int
    done: int = 0

    def end(self, row: Mapping[str, Any]) -> None:
        self.done += 1
        sys.stderr.write(f"{self.done}/{self.total} {summary(row)}\n")
        sys.stderr.flush()
