"""What is said of a job that is done: one row of the results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokensteer.app.runs import answers
from tokensteer.app.runs.prepare import PreparedJob
from tokensteer.app.runs.prompts import only
from tokensteer.app.runs.recipes import Recipe
from tokensteer.core.particles.result import Result
from tokensteer.tasks.common.metrics import Measured, measured
from tokensteer.tasks.common.task import Task, Trained


def answer_of(recipe: Recipe, result: Result) -> tuple[Result, Tensor]:
    """What a method answers with, and which populations it is of, (B,): of those that died there is none, unless the
    method looks at no weights."""
    kept = result.alive
    kept = torch.ones_like(kept) if recipe.answer is answers.unweighted else kept
    return recipe.answer(answers.some(result, kept)), kept


def measure(task: Task, answer: Result, kept: Tensor) -> dict[str, Measured]:
    """Metrics of an answer that is of the `kept` populations alone. Where prompts have lost different numbers of them
    each prompt is measured by itself, and the means over prompts are given."""
    if not kept.any():
        return {}
    if answer.reward is not None:  # a particle of no weight counts for nothing, whatever its reward
        answer = replace(answer, reward=torch.where(answer.log_w == -math.inf, 0.0, answer.reward))
    if task.prompted is None or kept.all():
        return dict(task.metrics(answer))
    own = [int(count) for count in kept.view(len(task.prompted.prompts), -1).sum(-1)]
    places = [k for k, count in enumerate(own) if count]
    if len({own[k] for k in places}) == 1:
        return dict(only(task, places).metrics(answer))
    owner = torch.tensor([k for k in places for _ in range(own[k])], device=kept.device)
    found = [only(task, [k]).metrics(answers.some(answer, owner == k)) for k in places]
    return {name: measured(torch.tensor([metrics[name].mean for metrics in found])) for name in found[0]}


def row_of(ready: PreparedJob, result: Result, answer: Result, kept: Tensor, seconds: float) -> dict[str, Any]:
    """What is said of a job that is done: `metrics` of its answer, and apart from them of the best by reward."""
    job, recipe, living = ready.job, ready.recipe, result.alive
    best = None if result.reward is None or not living.any() else answers.best(answers.some(result, living))
    # Without a twist there is no normaliser to estimate, and a pinned particle makes the estimate a biased one.
    estimates = ready.method.steering.twist is not None and not recipe.sweeps and recipe.estimates
    log_z = Measured(*result.pooled_log_z) if estimates else Measured(math.nan, math.nan)
    return {
        "task": job.task,
        "method": job.label,
        "particles": job.particles,
        "populations": len(result.log_w),
        "seed": job.seed,
        "about": ready.task.about,
        "answer": recipe.answer.__name__,
        "metrics": _numbers(measure(ready.task, answer, kept)),
        "best": None if best is None else _numbers(measure(ready.task, best, living)),
        "log_z": _number(log_z.mean),
        "log_z_error": _number(log_z.error),
        "rows": dict(result.rows),
        "saved": dict(result.saved),
        "seconds": round(seconds, 3),
        "job": job.stored(),
        **({"training": _training(recipe.trained(ready.task))} if recipe.trained is not None else {}),
        **_failures(ready.task),
        **_dead(ready, kept),
    }


def _dead(ready: PreparedJob, kept: Tensor) -> dict[str, Any]:
    """How many populations died, if any did, and the prompts that have lost all of theirs."""
    if kept.all():
        return {}
    asked = () if ready.task.prompted is None else ready.task.prompted.prompts
    lost = [prompt.id for prompt, own in zip(asked, kept.view(max(1, len(asked)), -1), strict=False) if not own.any()]
    return {"dead": int((~kept).sum())} | ({"dead prompts": lost} if lost else {})


def _failures(task: Task) -> dict[str, Any]:
    """The prompts that gave nothing, if there are any."""
    failed = () if task.prompted is None else task.prompted.failed
    listed = [{"prompt": prompt.text, "id": prompt.id, "error": reason} for prompt, reason in failed]
    return {"failed": listed} if listed else {}


def _training(trained: Trained) -> dict[str, Any]:
    """What it had taken to learn, and how that went."""
    card = trained.card
    return {name: card[name] for name in ("denoiser rows", "seconds", "device", "history")}


def _number(value: float) -> float | None:
    """For JSON, which knows no NaN."""
    return value if math.isfinite(value) else None


def _numbers(found: Mapping[str, Measured]) -> dict[str, list[float | None]]:
    return {name: [_number(value.mean), _number(value.error)] for name, value in found.items()}
