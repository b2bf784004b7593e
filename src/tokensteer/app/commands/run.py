"""`tokensteer run`: one method on a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokensteer.app import options
from tokensteer.app.given import given
from tokensteer.app.options import Compare, Outcome, Where
from tokensteer.app.runs.config import config
from tokensteer.app.runs.folder import Run, Writer, going_on, open_run, writing
from tokensteer.app.runs.jobs import Job
from tokensteer.app.runs.prepare import Environment, prepare
from tokensteer.app.runs.recipes import recipe_of
from tokensteer.app.runs.resume import check_same, earlier
from tokensteer.app.runs.rows import settled
from tokensteer.app.runs.run_all import Rows, rows_of, run_all, workers_for
from tokensteer.app.runs.sizes import check_fits
from tokensteer.app.terminal.draws import draws
from tokensteer.app.terminal.progress import shown
from tokensteer.app.terminal.tables import deaths, failures, learned_elsewhere, plans, say, tables, terminal
from tokensteer.app.words.lookup import choose
from tokensteer.core.steering.pilots import Budget
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.settings import Settings
from tokensteer.tasks.common.task import SHIPPED
from tokensteer.workers.pool import Workers

THIS_PROCESS = Workers()
BUDGET = "30s"
"""What auto may spend unless it is said."""


def main(command: options.Run, words: str) -> Outcome:
    place, settings = environment(command.where), with_steps(command)
    own = choose(command.task, TASKS, "task")
    method = command.method or (own.usual_method(settings, place.weights) if command.budget is None else "auto")
    budget = budget_of(method, command.budget)
    if budget is not None and command.particles is not None:
        raise ValueError("auto chooses the particles within its --budget: leave out --particles")
    particles = own.particles if command.particles is None else command.particles
    populations = own.populations if command.populations is None else command.populations
    job = Job(command.task, method, particles, populations, command.seed, settings, budget=budget)
    own_units = {"islands": 1 if command.islands is None else command.islands, "split_prompts": command.split_prompts}
    job = replace(job, keep_states=command.keep_states, **own_units)
    return run_command(command, method, [job], place, words)


def budget_of(method: str, given: str | None) -> str | None:
    """The budget of a method: None unless pilots plan it."""
    if not recipe_of(method).planned:
        if given is not None:
            raise ValueError(f"--budget is for the method auto, and this is {method}: leave out one of the two")
        return None
    budget = BUDGET if given is None else given
    Budget.of(budget)  # raises before anything is loaded
    return budget


def environment(where: Where) -> Environment:
    return Environment(where.weights or SHIPPED, where.device, where.memory, cluster=where.ray is not None)


def workers_of(where: Where) -> Workers:
    """The workers of a command. With --device cuda each has a GPU unless it is said."""
    several = where.ray is not None or (where.workers or 1) > 1
    gpus = float(several and where.device == "cuda") if where.gpus_per_worker is None else where.gpus_per_worker
    return Workers(where.workers, where.ray, gpus)


def with_steps(command: options.Run | Compare) -> Settings:
    """The settings of a command, with the task's number of steps unless one is given."""
    steps = command.settings.steps
    return replace(command.settings, steps=choose(command.task, TASKS, "task").steps if steps is None else steps)


def out_of(command: options.Run | Compare, name: str) -> Path:
    return command.out or Path("out") / f"{command.task}-{name}"


def run_command(
    command: options.Run | Compare, name: str, jobs: Sequence[Job], place: Environment, words: str
) -> Outcome:
    """Run jobs into the folder of a command, which is called after the task and `name` unless it is given."""
    out = out_of(command, name)
    where = command.where
    known = config(words, jobs, place, given(command))
    rows = run_jobs(jobs, place, out, known, where.force, where.resume, workers_of(where))
    say(f"Run folder: {out}   (tokensteer report {out} makes a page of it)")
    return {"folder": str(out), "rows": rows}


def run_jobs(
    jobs: Sequence[Job],
    place: Environment,
    out: Path,
    config: Mapping[str, Any],
    force: bool,
    resume: bool = False,
    workers: Workers = THIS_PROCESS,
) -> Sequence[Mapping[str, Any]]:
    """Run all jobs into a folder, with `resume` those that have no row there yet, and print their tables. The rows."""
    with _writer(out, config, force, resume) as writer:
        kept = len(writer.rows)
        # All of them: what one method leaves aside another may use.
        ready = prepare(jobs, place.here) if kept < len(jobs) else []
        rows_left = rows_of(ready, writer)
        for unit in rows_left.missing:
            check_fits(ready[unit.row], place, unit)
        if not writer.begun:
            writer.config = {**writer.config, "jobs": [settled(one) for one in ready]}
        try:
            _run(rows_left, place, writer, workers, (len(jobs), kept))
        finally:  # also when it is stopped
            console, rows = terminal(), writer.rows
            for line in draws(open_run(out), console.width, console.color_system is not None) if rows else ():
                say(line, console)
            left = [job for row, job in enumerate(jobs) if row not in writer.done]
            missing = [f"{job.label}, N = {job.particles}, seed {job.seed}" for job in left]
            lines = [*tables(rows, console.width), *plans(rows), *learned_elsewhere(rows)]
            lines += [*failures(rows), *deaths(rows)]
            if rows and missing:
                lines.append(f"Unfinished: {len(rows)} of {len(jobs)} rows. Missing: {'; '.join(missing)}")
                lines += [] if "options" not in config else ["The same command with --resume runs what is missing"]
            if kept:
                lines.append(f"Kept {kept} rows that were there, and ran {len(rows) - kept}")
            for line in lines:
                say(line, console)
        return rows


def _run(rows: Rows, place: Environment, writer: Writer, workers: Workers, counts: tuple[int, int]) -> None:
    """Run the units that are missing; `counts` has the number of rows, and of those that are done."""
    units, missing = sum(map(len, rows.units.values())), len(rows.missing)
    if 0 < missing < (workers.count or 1):
        say(f"{missing} units for {workers.count} workers: --islands and --split-prompts make more of them")
    with shown(*counts, units, units - missing) as watch:
        if rows.units:
            with workers_for(workers, rows.ready, place, watch) as pool:
                run_all(rows, writer, watch, pool)


def _writer(out: Path, config: Mapping[str, Any], force: bool, resume: bool) -> AbstractContextManager[Writer]:
    if not resume:
        return writing(out, config, force)

    def found() -> Run | None:
        run = earlier(out, config["options"])
        if run is not None:
            check_same(run, config)
        return run

    return going_on(out, found, config)
