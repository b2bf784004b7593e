"""The commands that run, compare, train and report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokensteer.app.options import Compare, Run
from tokensteer.app.runs import recipes as methods
from tokensteer.app.runs.choices import tilted
from tokensteer.app.runs.folder import Writer
from tokensteer.app.runs.jobs import Job, plan
from tokensteer.app.runs.match_rows import matched
from tokensteer.app.runs.prepare import Environment, make_task, prepare, setup_of
from tokensteer.app.runs.runner import config, run_all
from tokensteer.app.terminal.progress import shown
from tokensteer.app.terminal.tables import deaths, failures, say, tables, terminal
from tokensteer.app.words.lookup import choose
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.settings import Settings
from tokensteer.tasks.common.task import SHIPPED


def steer(command: Run | Compare, words: str) -> int:
    where, settings = command.where, command.settings
    place = Environment(SHIPPED if where.weights is None else where.weights, where.device, where.memory)
    if settings.steps is None:
        settings = replace(settings, steps=choose(command.task, TASKS, "task").steps)
    if isinstance(command, Run):
        jobs = [Job(command.task, command.method, command.particles, command.populations, command.seed, settings)]
        out = Path("out") / f"{command.task}-{command.method}" if command.out is None else command.out
    else:
        jobs = _compared(command, settings, place)
        out = Path("out") / f"{command.task}-{command.recipe}" if command.out is None else command.out
    run_jobs(jobs, place, out, words, where.force)
    say(f"Run folder: {out}   (tokensteer report {out} makes a page of it)")
    return 0


def run_jobs(jobs: Sequence[Job], place: Environment, out: Path, words: str, force: bool) -> Writer:
    """Run all jobs into a folder and print their tables."""
    with Writer(out, config(words, jobs, place), force) as writer:
        ready = prepare(jobs, place)
        try:
            with shown(len(ready)) as watch:
                run_all(ready, place, writer, watch)
        finally:  # also when it was stopped
            console = terminal()
            for part in tables(writer.rows, console.width):
                say(part, console)
            for line in [*failures(writer.rows), *deaths(writer.rows), *unfinished(writer.rows, jobs)]:
                say(line, console)
    return writer


def unfinished(rows: Sequence[Mapping[str, Any]], jobs: Sequence[Job]) -> list[str]:
    """A line that says what is missing of a run that has begun and was stopped."""
    missing = [f"{job.label}, N = {job.particles}, seed {job.seed}" for job in jobs[len(rows) :]]
    return [f"Unfinished: {len(rows)} of {len(jobs)} rows. Missing: {'; '.join(missing)}"] if rows and missing else []


def _compared(command: Compare, settings: Settings, place: Environment) -> list[Job]:
    choose(command.task, TASKS, "task")
    for name, example in (("methods", "smc-base svdd"), ("particles", "4 16"), ("seeds", "0 1")):
        if getattr(command, name) == ():
            raise ValueError(f"--{name} lists nothing: give one or more, such as --{name} {example}, or leave it out")
    usual: list[str] = []
    if command.methods is None:
        # Which methods suit a task is known once it is there.
        job = Job(command.task, "pretrained", 1, 1, settings=replace(settings, steps=1))
        task = make_task(setup_of(job, place), command.task)
        tilt = tilted(task, settings)
        usual, lacking = methods.usual(task, tilt), methods.lacking(task, tilt)
        for reason in dict.fromkeys(lacking.values()):
            say(f"Left out: {', '.join(name for name in lacking if lacking[name] == reason)} ({reason})")
    jobs = plan(
        command.recipe,
        command.methods,
        command.particles,
        command.populations,
        command.seeds,
        usual,
        command.task,
        settings,
    )
    return jobs if command.match_rows is None else matched(jobs, command.match_rows, place)
