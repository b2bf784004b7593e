"""`tokensteer demo`: methods on a mixture of Gaussians and, at equal cost, on handwritten digits; shipped weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokensteer.app.commands.run import run_jobs
from tokensteer.app.options import Demo, Outcome
from tokensteer.app.report import write
from tokensteer.app.runs.config import config
from tokensteer.app.runs.jobs import Job
from tokensteer.app.runs.match_rows import matched
from tokensteer.app.runs.prepare import Environment
from tokensteer.app.terminal.tables import say
from tokensteer.tasks.common.settings import Settings


@dataclass(frozen=True)
class Size:
    """The size of a task. Methods that give one sample per population may have `alone` particles in each, and as many
    more populations. Methods have equal N, or each the particles that the network rows of `as_many_rows_as` with this
    size pay for."""

    task: str
    particles: int
    populations: int
    steps: int
    methods: tuple[str, ...]
    alone: int | None = None
    as_many_rows_as: str | None = None


MOG = ("pretrained", "best-of-n", "fk-difference", "prop-grad", "smc-base", "smc-grad", "smc-amot")
DIGITS = ("pretrained", "best-of-n", "svdd", "fk-difference", "smc-base", "smc-grad", "smc-amot", "auto")
SIZES = (
    Size("mog", 500, 16, 100, MOG, alone=5),
    Size("digits", 4, 16, 50, DIGITS, as_many_rows_as="smc-grad"),
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
    many = size.particles * size.populations
    sizes = {name: (size.alone if name in ALONE else None) or size.particles for name in size.methods}
    jobs = [Job(size.task, name, n, many // n, seed, Settings(size.steps)) for name, n in sizes.items()]
    if size.as_many_rows_as is None:
        return jobs
    alike = matched(jobs, size.as_many_rows_as, place)
    return [replace(job, extra=(), why=None) for job in alike]  # the same for all of them
