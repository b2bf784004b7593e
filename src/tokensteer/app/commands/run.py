"""The commands that run, compare, train and report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokensteer.app.options import Compare, Run, Setting
from tokensteer.app.runs import recipes as methods
from tokensteer.app.runs.folder import Writer
from tokensteer.app.runs.jobs import Job, plan
from tokensteer.app.runs.match_rows import matched
from tokensteer.app.runs.runner import Environment, config, make_task, prepare, run_all, setup_of
from tokensteer.app.terminal.progress import shown
from tokensteer.app.terminal.tables import deaths, failures, say, tables, terminal
from tokensteer.app.words.lookup import choose
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.task import SHIPPED


def steer(command: Run | Compare, words: str) -> int:
    setting = command.setting
    place = Environment(SHIPPED if setting.weights is None else setting.weights, setting.device, setting.memory)
    if isinstance(command, Run):
        jobs = [
            Job(
                method=command.method,
                particles=command.particles,
                populations=command.populations,
                seed=command.seed,
                **_common(command.task, setting),
            )
        ]
        out = Path("out") / f"{command.task}-{command.method}" if command.out is None else command.out
    else:
        jobs = _compared(command, place)
        out = Path("out") / f"{command.task}-{command.recipe}" if command.out is None else command.out
    run_jobs(jobs, place, out, words, setting.force)
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


def _common(task: str, setting: Setting) -> dict[str, Any]:
    names = ("goal", "kl", "draws", "noise", "ramp", "trigger", "remask", "reward")
    given: dict[str, Any] = {name: getattr(setting, name) for name in names}
    steps = choose(task, TASKS, "task").steps if setting.steps is None else setting.steps
    return given | {"task": task, "steps": steps, "prompts": None if setting.prompts is None else str(setting.prompts)}


def _compared(command: Compare, place: Environment) -> list[Job]:
    choose(command.task, TASKS, "task")
    for name, example in (("methods", "smc-base svdd"), ("particles", "4 16"), ("seeds", "0 1")):
        if getattr(command, name) == ():
            raise ValueError(f"--{name} lists nothing: give one or more, such as --{name} {example}, or leave it out")
    usual: list[str] = []
    if command.methods is None:
        # Which methods suit a task is known once it is there.
        setting = command.setting
        job = Job(method="pretrained", particles=1, populations=1, **_common(command.task, setting))
        task = make_task(setup_of(replace(job, steps=1), place), command.task)
        tilt = methods.tilted(task, setting.draws, setting.ramp, setting.noise)
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
        _common(command.task, command.setting),
    )
    return jobs if command.match_rows is None else matched(jobs, command.match_rows, place)
