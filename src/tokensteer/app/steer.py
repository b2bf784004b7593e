"""The commands that run, compare, train and report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tokensteer.app import methods
from tokensteer.app.budget import matched
from tokensteer.app.claims import claimed
from tokensteer.app.jobs import Job, plan
from tokensteer.app.names import choose
from tokensteer.app.options import Compare, Report, Run, Setting, Train
from tokensteer.app.play import Place, config, make_task, play, prepare, setup_of
from tokensteer.app.progress import shown
from tokensteer.app.runs import Writer
from tokensteer.app.table import plain_console, tables
from tokensteer.tasks.catalogue import LEARNERS, STEPS, TASKS, TRAINERS, TWISTERS
from tokensteer.tasks.task import SHIPPED
from tokensteer.tasks.training import Training, finished


def steer(command: Run | Compare, words: str) -> int:
    setting = command.setting
    place = Place(SHIPPED if setting.weights is None else setting.weights, setting.device, setting.memory)
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


def run_jobs(jobs: Sequence[Job], place: Place, out: Path, words: str, force: bool) -> Writer:
    """Run all jobs into a folder and print their tables."""
    with Writer(out, config(words, jobs, place), force) as writer:
        ready = prepare(jobs, place)
        try:
            with shown(len(ready)) as watch:
                play(ready, place, writer, watch)
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


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each prompt that gave nothing, whatever the method."""
    every = [failed for row in rows for failed in row.get("failed", ())]
    return list(dict.fromkeys(f"prompt {failed['id']} failed: {failed['error']}" for failed in every))


def deaths(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each row of which populations died, with the mend."""
    mend = "no particle kept any weight. Use more particles, resample earlier, or soften the reward"
    return [f"{_who(row)}: {row['dead']} of {row['populations']} {_died(row)}: {mend}" for row in rows if "dead" in row]


def _who(row: Mapping[str, Any]) -> str:
    return f"{row['method']}, N = {row['particles']}, seed {row['seed']}"


def _died(row: Mapping[str, Any]) -> str:
    prompts = row.get("dead prompts", ())
    return "populations died" + (f", all of prompt {', '.join(prompts)}" if prompts else "")


def terminal() -> Console:
    """The standard output stream; a file has no edge to wrap at."""
    console = plain_console()
    return console if console.is_terminal else plain_console(width=200)


def say(part: str | Table, console: Console | None = None) -> None:
    (console or terminal()).print(part, soft_wrap=isinstance(part, str))


def _common(task: str, setting: Setting) -> dict[str, Any]:
    names = ("goal", "kl", "draws", "noise", "ramp", "trigger", "remask", "reward")
    given: dict[str, Any] = {name: getattr(setting, name) for name in names}
    steps = STEPS.get(task, 100) if setting.steps is None else setting.steps
    return given | {"task": task, "steps": steps, "prompts": None if setting.prompts is None else str(setting.prompts)}


def _compared(command: Compare, place: Place) -> list[Job]:
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


def train(command: Train) -> int:
    choose(command.task, TASKS, "task")
    if command.task not in TRAINERS:
        raise ValueError(f"{command.task} has no networks, and nothing to train: run it as it is")
    if command.proposal and command.twist:
        raise ValueError("--proposal and --twist are trained one after the other: give one of them")
    if command.goal is not None and not command.proposal and not command.twist:
        raise ValueError("--goal is what a proposal or a twist is trained for: give --proposal or --twist too")
    if command.weights is not None and not command.proposal and not command.twist:
        raise ValueError("--weights holds the networks that a proposal or a twist is taught with: give --proposal too")
    if command.twist and command.task not in TWISTERS:
        raise ValueError(f"the twist of {command.task} is learned with its proposal: give --proposal instead")
    out = Path("out") / f"{command.task}-weights" if command.out is None else command.out
    for name, value in (("minutes", command.minutes), ("scale", command.scale)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name} must be positive and finite, got {value}")
    training = Training(out, command.device, command.seed, command.minutes, command.scale)
    with claimed(out):
        _train(command, training)
    say(f"Weights: {out}   (tokensteer run {command.task} --weights {out} uses them)")
    return 0


def _train(command: Train, training: Training) -> None:
    out = training.out
    if finished(_cards(command, out)) and not command.force:
        raise ValueError(f"{out} holds finished weights of {command.task}: give --out another folder, or --force")
    if command.proposal or command.twist:
        weights = SHIPPED if command.weights is None else command.weights
        (LEARNERS if command.proposal else TWISTERS)[command.task](training, command.goal, weights)
    else:
        TRAINERS[command.task](training)


def _cards(command: Train, out: Path) -> list[Path]:
    """The cards that a training of this kind leaves in a folder. What was stopped while it was being measured goes on:
    its cards do not tell its quality yet."""
    part = "proposal*" if command.proposal else "value*" if command.twist else "*"
    cards = sorted(out.glob(f"{command.task}-{part}.json")) if out.is_dir() else []
    if part != "*":
        return cards
    taught = ("proposal", "value", "drakes", "quality")
    return [card for card in cards if not card.stem.removeprefix(f"{command.task}-").startswith(taught)]


def report(command: Report) -> int:
    from tokensteer.app.report import figures  # as below

    made = figures(command.folder) if command.figures else []  # first: without matplotlib nothing is written
    say(f"Report: {write_report(command.folder)}")
    for file in made:
        say(f"Figure: {file}")
    return 0


def write_report(folder: Path) -> Path:
    from tokensteer.app.report import write  # its parts take a while to load

    return write(folder)
