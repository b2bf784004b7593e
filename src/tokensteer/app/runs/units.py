"""The units of a row: the whole of it, or its prompts and islands, each with a seed and a file of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokensteer.app.runs.jobs import Job
from tokensteer.app.runs.prepare import PreparedJob
from tokensteer.app.runs.prompts import joined, side_by_side
from tokensteer.core.particles.result import Result
from tokensteer.workers.units import seeds_of


@dataclass(frozen=True)
class Unit:
    """A part of row number `row` that is run on its own: one of its prompts, one of its islands (some of the
    populations), or both. `job` has the populations and the seed of the unit."""

    row: int
    job: Job
    prompt: int | None = None
    island: int | None = None

    @property
    def is_row(self) -> bool:
        """Whether it is the whole row."""
        return self.prompt is None and self.island is None

    @property
    def name(self) -> str:
        """The name within its row, from which its seed is made."""
        job = self.job
        parts = [] if self.prompt is None else [f"prompt-{self.prompt}"]
        parts += [] if self.island is None else [f"island-{self.island}"]
        return "/".join((job.task, job.label, f"n{job.particles}", *parts))

    def __str__(self) -> str:
        return f"the unit {self.name}, seed {self.job.seed}"


@dataclass(frozen=True)
class Part:
    """The outcome of a unit: its result, or the error of a prompt that failed."""

    unit: Unit
    result: Result | None
    seconds: float
    error: str = ""


def units_of(row: int, ready: PreparedJob) -> list[Unit]:
    """The units of a job. They depend on its options alone, never on the workers. A unit that is the whole row has the
    seed of the row, others have seeds made from that and their names."""
    job, prompted = ready.job, ready.task.prompted
    prompts: list[int | None] = [None]
    if prompted is not None and len(prompted.prompts) > 1 and (job.split_prompts or job.islands > 1):
        prompts = list(range(len(prompted.prompts)))
    if prompts == [None] and job.islands == 1:
        return [Unit(row, job)]
    least, more = divmod(job.populations, job.islands)
    sizes = [least + (k < more) for k in range(job.islands)]
    islands = [(None, job.populations)] if job.islands == 1 else list(enumerate(sizes))
    found = [Unit(row, replace(job, populations=n, islands=1), k, j) for k in prompts for j, n in islands]
    seeds = seeds_of(job.seed, (unit.name for unit in found))
    return [replace(unit, job=replace(unit.job, seed=seeds[unit.name])) for unit in found]


def file_of(unit: Unit, job: Job) -> str:
    """The name of a unit's file in the folder of a run; `job` is that of its row."""
    return f"{unit.row:03d}-{job.file}-{unit.prompt or 0}-{unit.island or 0}"


def whole(parts: Sequence[Part]) -> tuple[Result, dict[int, str]]:
    """The result of a row from those of its units, and the prompts that failed, with the reason. Raises ValueError if
    all of them did."""
    failed = {part.unit.prompt: part.error for part in parts if part.error}
    prompts = dict.fromkeys(part.unit.prompt for part in parts if part.unit.prompt not in failed)
    if not prompts:
        raise ValueError(parts[-1].error)
    results = [
        joined([part.result for part in parts if part.unit.prompt == prompt and part.result is not None])
        for prompt in prompts
    ]
    reasons = {prompt: reason for prompt, reason in failed.items() if prompt is not None}
    return side_by_side(results), reasons
