"""Methods at equal cost: each gets as many particles as the network rows of a reference method would pay for.

What a method asks of the networks depends on its parts (when weights are looked at, how many clean samples stand behind
an estimate) and not on what the networks answer. So it is counted in a rehearsal, with networks that answer in no time.
Rows are those of the denoiser and of the reward together, asked for whether or not they were known already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from tokensteer.app.runs.jobs import Job
from tokensteer.app.runs.prepare import Environment, PreparedJob, make_task, put_together, setup_of
from tokensteer.app.runs.recipes import recipe_of
from tokensteer.app.runs.runner import run_one
from tokensteer.core.models.denoiser import Denoiser, Time, from_logits
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.particles.path import Record
from tokensteer.tasks.common.task import Task

REHEARSED = 4
"""Particles in a rehearsal: the smallest number with which every method does all that it does."""


def matched(jobs: Sequence[Job], reference: str, place: Environment) -> list[Job]:
    """The jobs with as many particles, at least one, as what `reference` asks for with theirs would pay for."""
    recipe_of(reference)  # before anything is loaded
    make = cache(make_task)

    @cache
    def each(job: Job) -> float:
        """Rows for a particle. Jobs that differ in nothing that counts are rehearsed once."""
        return rows_per_particle(put_together(job, silent(make(setup_of(job, place), job.task))), place)

    def rows(job: Job, method: str) -> float:
        return each(replace(job, method=method, particles=REHEARSED, populations=1, seed=0, extra=()))

    found: list[Job] = []
    for job in jobs:
        budget = round(job.particles * rows(job, reference))
        particles = max(1, int(budget / rows(job, job.method)))
        found.append(replace(job, particles=particles, extra=(*job.extra, f"rows = {budget}")))
    return found


def rows_per_particle(ready: PreparedJob, place: Environment) -> float:
    """Denoiser and reward rows that a method asks for, for each of its particles."""
    result = run_one(ready, place, _unwatched)
    asked = sum(result.rows.values()) + sum(result.saved.values())
    return asked / result.log_w.numel()


def silent(task: Task) -> Task:
    """The task with networks that find all tokens as likely and all sequences as good, and are asked about them all:
    how many would be known already depends on who is resampled."""
    task = task if task.prompted is None else task.prompted.only([0], ())  # all prompts cost the same
    tilt, conditional, uniform = replace(task.tilt, reward=_indifferent), task.conditional, task.uniform
    return replace(
        task,
        model=_silenced(task.model),
        tilt=tilt,
        conditional=None if conditional is None else lambda: _silenced(conditional()),
        uniform=None if uniform is None else lambda: _silenced(uniform()),
    )


def _silenced(model: Diffusion) -> Diffusion:
    return replace(model, denoiser=_uniform(model), sharing=False)


def _uniform(model: Diffusion) -> Denoiser:
    def logits(x: Tensor, t: Time) -> Tensor:
        return torch.zeros(*x.shape[:2], model.vocab_size, dtype=model.dtype, device=x.device)

    return from_logits(logits, model.kernel.mask_id)


def _indifferent(x: Tensor) -> Tensor:
    """Zero, with a gradient of zero where one is asked for."""
    return 0.0 * x.flatten(1).sum(-1)


def _unwatched(record: Record) -> None: ...
