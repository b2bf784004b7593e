"""`tokensteer demo`: every method on a mixture of Gaussians and on handwritten digits, with the shipped weights."""

from __future__ import annotations

from dataclasses import dataclass

from tokensteer.app.commands.run import run_jobs
from tokensteer.app.options import Demo, Outcome
from tokensteer.app.report import write
from tokensteer.app.runs import recipes
from tokensteer.app.runs.jobs import Job
from tokensteer.app.runs.prepare import Environment, make_task
from tokensteer.app.runs.runner import config
from tokensteer.app.terminal.tables import say
from tokensteer.tasks.common.settings import Settings
from tokensteer.tasks.common.task import Setup


@dataclass(frozen=True)
class Size:
    """The size of a task. Methods that give one sample per population may have `alone` particles in each, and as many
    more populations."""

    task: str
    particles: int
    populations: int
    steps: int
    alone: int | None = None


SIZES = (Size("mog", 1000, 8, 100, alone=5), Size("digits", 16, 8, 50))
"""Enough to tell the methods apart, within three minutes on two cores."""
ALONE = ("best-of-n", "svdd")


def main(command: Demo, words: str) -> Outcome:
    jobs = [job for size in SIZES for job in jobs_of(size, command.seed)]
    place = Environment()
    rows = run_jobs(jobs, place, command.out, config(words, jobs, place), command.force)
    page = write(command.out)
    say(f"Report: {page}")
    return {"folder": str(command.out), "rows": rows, "report": str(page)}


def jobs_of(size: Size, seed: int) -> list[Job]:
    """All methods that suit the task, with the same total number of particles."""
    task = make_task(Setup(1), size.task)
    many = size.particles * size.populations
    usual = recipes.usual(task, task.tilt)
    sizes = {name: (size.alone if name in ALONE else None) or size.particles for name in usual}
    return [Job(size.task, name, n, many // n, seed, Settings(size.steps)) for name, n in sizes.items()]
