"""`tokensteer demo`: methods on a mixture of Gaussians and, at equal cost, on handwritten digits; shipped weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokensteer.app.commands.run import run_jobs
from tokensteer.app.options import Demo, Outcome
from tokensteer.app.report import write
from tokensteer.app.runs import recipes
from tokensteer.app.runs.config import config
from tokensteer.app.runs.jobs import Job
from tokensteer.app.runs.match_rows import matched
from tokensteer.app.runs.prepare import Environment, make_task
from tokensteer.app.terminal.tables import say
from tokensteer.tasks.common.settings import Settings
from tokensteer.tasks.common.task import Setup


@dataclass(frozen=True)
class Size:
    """The size of a task. Methods that give one sample per population may have `alone` particles in each, and as many
    more populations. Methods are all that suit the task unless given, at equal N, or each with the particles that the
    network rows of `as_many_rows_as` with this size pay for."""

    task: str
    particles: int
    populations: int
    steps: int
    alone: int | None = None
    methods: tuple[str, ...] = ()
    as_many_rows_as: str | None = None


MOG = ("pretrained", "best-of-n", "fk-difference", "prop-grad", "smc-base", "smc-grad", "smc-amot")
DIGITS = ("pretrained", "best-of-n", "svdd", "fk-difference", "smc-base", "smc-grad", "smc-amot", "auto")
SIZES = (
    Size("mog", 500, 16, 100, alone=5, methods=MOG),
    Size("digits", 4, 16, 50, methods=DIGITS, as_many_rows_as="smc-grad"),
)
"""Enough to tell the methods apart, within three minutes on two cores."""
ALONE = ("best-of-n", "svdd")


def main(command: Demo, words: str) -> Outcome:
    place = Environment()
    jobs = [job for size in SIZES for job in jobs_of(size, command.seed, place)]
    rows = run_jobs(jobs, place, command.out, config(words, jobs, place), command.force)
    page = write(command.out)
    say(f"Report: {page}")
    return {"folder": str(command.out), "rows": rows, "report": str(page)}


def jobs_of(size: Size, seed: int, place: Environment) -> list[Job]:
    """The methods of a size, with the same total number of particles or of network rows."""
    task = make_task(Setup(1), size.task)
    many = size.particles * size.populations
    usual = size.methods or recipes.usual(task, task.tilt)
    sizes = {name: (size.alone if name in ALONE else None) or size.particles for name in usual}
    jobs = [Job(size.task, name, n, many // n, seed, Settings(size.steps)) for name, n in sizes.items()]
    if size.as_many_rows_as is None:
        return jobs
    alike = matched(jobs, size.as_many_rows_as, place)
    return [replace(job, extra=(), why=None) for job in alike]  # the same for all of them
