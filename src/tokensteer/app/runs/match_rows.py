"""Methods at equal cost: each gets as many particles as the network rows of a reference method pay for.

How many rows a method needs depends on its parts (when it resamples, how many draws an estimate takes) and not on the
networks' outputs. So rows are counted in a rehearsal with trivial networks. They are the rows of all networks together,
computed or saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from tokensteer.app.runs.jobs import Job
from tokensteer.app.runs.prepare import Environment, make_task, put_together, setup_of
from tokensteer.app.runs.recipes import recipe_of
from tokensteer.app.runs.runner import run_one
from tokensteer.core.models.denoiser import Time, from_logits
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.product import Product
from tokensteer.tasks.common.task import Task

REHEARSED = 4
"""Particles in a rehearsal: the smallest number with which every method takes all of its steps."""


def matched(jobs: Sequence[Job], reference: str, place: Environment) -> list[Job]:
    """The jobs with as many particles, at least one, as the rows of `reference` with their original number pay for; a
    method that pilots plan gets these rows as its budget."""
    recipe_of(reference)  # raises before anything is loaded
    make = cache(make_task)

    @cache
    def each(job: Job) -> float:
        """Rows per particle. Equal rehearsals are run once."""
        ready = put_together(job, _trivial(make(setup_of(job, place), job.task)))
        result = run_one(ready, place, lambda record: None)
        return (sum(result.rows.values()) + sum(result.saved.values())) / result.log_w.numel()

    def rows(job: Job, method: str) -> float:
        return each(replace(job, method=method, particles=REHEARSED, populations=1, seed=0, extra=()))

    found: list[Job] = []
    for job in jobs:
        budget = round(job.particles * rows(job, reference))
        if recipe_of(job.method).planned:
            whole = budget * job.populations
            found.append(replace(job, budget=str(whole), extra=(*job.extra, f"rows = {budget}")))
            continue
        particles = max(1, int(budget / rows(job, job.method)))
        why = f"{particles:,}: what {budget:,} network rows a population pay for"
        found.append(replace(job, particles=particles, why=why, extra=(*job.extra, f"rows = {budget}")))
    return found


def _trivial(task: Task) -> Task:
    """The task with uniform denoisers that share no rows (how many could be shared depends on resampling), and a reward
    of zero."""
    task = task if task.prompted is None else task.prompted.only([0], ())  # all prompts cost the same
    guided, uniform = task.guided, task.uniform
    return replace(
        task,
        model=_uniform(task.model),
        tilt=replace(task.tilt, reward=_zero),
        guided=None if guided is None else lambda: _uniform_product(guided()),
        uniform=None if uniform is None else lambda: _uniform(uniform()),
    )


def _uniform_product(product: Product) -> Product:
    return replace(product, models=tuple(map(_uniform, product.models)))


def _zero(x: Tensor) -> Tensor:
    """A reward of 0, with a gradient of 0 where one is computed."""
    return 0.0 * x.flatten(1).sum(-1)


def _uniform(model: Diffusion) -> Diffusion:
    def logits(x: Tensor, t: Time, *context: Tensor) -> Tensor:
        return torch.zeros(*x.shape[:2], model.vocab_size, dtype=model.dtype, device=x.device)

    return replace(model, denoiser=from_logits(logits, model.kernel.mask_id), sharing=False)
