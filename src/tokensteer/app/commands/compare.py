"""`tokensteer compare`: several methods, sizes and seeds on a task."""

from __future__ import annotations

from dataclasses import replace

from tokensteer.app.commands.run import environment, out_of, run_command, with_steps
from tokensteer.app.given import given
from tokensteer.app.options import Compare, Outcome
from tokensteer.app.runs import recipes
from tokensteer.app.runs.choices import tilted
from tokensteer.app.runs.folder import check_free
from tokensteer.app.runs.jobs import Job, plan
from tokensteer.app.runs.match_rows import matched
from tokensteer.app.runs.match_seconds import within
from tokensteer.app.runs.prepare import Environment, make_task, setup_of
from tokensteer.app.runs.resume import earlier, timed_before
from tokensteer.app.terminal.tables import say
from tokensteer.app.words.lookup import choose
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.settings import Settings


def main(command: Compare, words: str) -> Outcome:
    place, settings = environment(command.where), with_steps(command)
    choose(command.task, TASKS, "task")
    lists = (("methods", command.methods, "smc-base svdd"), ("particles", command.particles, "4 16"))
    for name, values, example in (*lists, ("seeds", command.seeds, "0 1")):
        if values == ():
            raise ValueError(f"--{name} lists nothing: give one or more, such as --{name} {example}, or leave it out")
    out, before = out_of(command, command.recipe), None
    if command.where.resume:  # before anything is timed
        before = earlier(out, given(command))
    else:
        check_free(out, command.where.force)
    usual = _usual(command.task, settings, place.here) if command.methods is None else []
    jobs = plan(command, settings, usual)
    jobs = jobs if command.match_rows is None else matched(jobs, command.match_rows, place.here)
    if command.budget is not None:
        if command.match_rows is not None or command.particles is not None:
            raise ValueError("--budget decides the particles: leave out --particles and --match-rows")
        if place.here.device != place.device:
            raise ValueError(f"--budget measures times in this process, which has no {place.device}: give --particles")
        jobs = timed_before(jobs, before, command.budget) if before else within(jobs, command.budget, place.here)
    elif any(recipes.recipe_of(job.method).planned for job in jobs):
        raise ValueError("auto needs a --budget, such as 30s; the other methods then get as much time")
    return run_command(command, command.recipe, jobs, place, words)


def _usual(name: str, settings: Settings, place: Environment) -> list[str]:
    """The default methods of a task. Prints those that are left out for want of networks."""
    job = Job(name, "pretrained", 1, 1, settings=replace(settings, steps=1))
    task = make_task(setup_of(job, place), name)
    tilt = tilted(task, settings)
    lacking = recipes.lacking(task, tilt)
    for reason in dict.fromkeys(lacking.values()):
        say(f"Left out: {', '.join(name for name in lacking if lacking[name] == reason)} ({reason})")
    return recipes.usual(task, tilt)
