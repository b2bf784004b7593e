"""The method "auto": pilots choose proposal, trigger, draws, ramp and particles within a budget."""

from __future__ import annotations

from dataclasses import replace

from torch import Generator

from tokensteer.app.runs.choices import RAMPS, ramp_name
from tokensteer.app.runs.prepare import Environment, PreparedJob
from tokensteer.app.runs.recipes import usual_clip
from tokensteer.core.proposals.proposal import Proposal
from tokensteer.core.steering.planner import CLIPS, plan, usual_proposals
from tokensteer.tasks.common.task import Task

PILOTED = 8
"""Particles in a population of a pilot."""
SHARE = 0.3
"""Of the budget, for pilots."""
LEARNED = "learned"


def planned(ready: PreparedJob, place: Environment) -> PreparedJob:
    """The job with the method and the number of particles that pilots choose. What its settings fix stays."""
    job, method = ready.job, ready.method
    steering, settings = method.steering, job.settings
    tilt = steering.twist
    assert tilt is not None, "every task has a reward"
    alternatives = {name: RAMPS[name] for name in ("linear", "constant")} if settings.ramp is None else {}
    clips = dict.fromkeys((usual_clip(ready.task, tilt), max(CLIPS))) if settings.clip is None else (settings.clip,)
    with steering.resources.limited(place.memory):
        chosen = plan(
            steering,
            job.budget or "",
            populations=job.populations * steering.resources.templates,
            particles=(PILOTED,),
            proposals=_learned(ready.task) | usual_proposals(steering, tuple(clips)),
            draws=None if settings.draws is None else (settings.draws,),
            ramps={ramp_name(tilt.ramp): tilt.ramp, **alternatives},
            triggers=None if settings.trigger is None else {settings.trigger: method.when},
            resample=method.resample,
            share=SHARE,
            generator=Generator(place.device).manual_seed(job.seed),
        )
    return replace(ready, job=replace(job, particles=chosen.num_particles), method=chosen.method, chosen=chosen)


def _learned(task: Task) -> dict[str, Proposal]:
    """The proposal that was trained for the task and its goal, if there is one."""
    try:
        return {} if task.learned is None else {LEARNED: task.learned().proposal}
    except FileNotFoundError:
        return {}
