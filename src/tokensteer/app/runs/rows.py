"""A finished job as a row of the results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokensteer.app.runs import answers, choices
from tokensteer.app.runs.auto import LEARNED
from tokensteer.app.runs.prepare import PreparedJob
from tokensteer.app.runs.prompts import only
from tokensteer.app.runs.recipes import Recipe, learned, other_reward
from tokensteer.app.words.numbers import stored
from tokensteer.core.particles.result import Result
from tokensteer.core.particles.triggers import never
from tokensteer.core.proposals.amortised import learned_parts
from tokensteer.core.proposals.gradient import Gradient
from tokensteer.core.proposals.proposal import of_kind
from tokensteer.core.twists.estimators import Sampled
from tokensteer.core.twists.tilt import Tilt
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.metrics import Measured, measured
from tokensteer.tasks.common.task import Task


def answer_of(recipe: Recipe, result: Result) -> tuple[Result, Tensor]:
    """The part of a result that a method answers with, and the mask (B,) of the populations it comes from: the living
    ones, or all if the method ignores weights."""
    kept = torch.ones_like(result.alive) if recipe.answer is answers.unweighted else result.alive
    return recipe.answer(answers.some(result, kept)), kept


def measure(task: Task, answer: Result, kept: Tensor) -> dict[str, Measured]:
    """Metrics of an answer, which has the `kept` populations only. If prompts have lost different numbers of
    populations, each prompt is measured on its own, and the metrics are means over prompts."""
    if not kept.any():
        return {}
    if answer.reward is not None:  # a particle without weight does not count: avoid 0 · -inf
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
    """The row of a job: `metrics` of its answer, and apart from them those of the best by reward. `counts` has the
    number of values that a metric is the mean of, where it is not the number of populations."""
    job, recipe, living = ready.job, ready.recipe, result.alive
    best = None if result.reward is None or not living.any() else answers.best(answers.some(result, living))
    # Without a twist there is no normaliser to estimate, and a pinned particle makes the estimate a biased one.
    estimates = ready.method.steering.twist is not None and not recipe.sweeps and recipe.estimates
    log_z, error = stored(Measured(*result.pooled_log_z)) if estimates else (None, None)
    metrics = measure(ready.task, answer, kept)
    counts = {name: value.count for name, value in metrics.items() if value.count not in (None, len(result.log_w))}
    return {
        "task": job.task,
        "method": job.label,
        "particles": job.particles,
        "populations": len(result.log_w),
        "seed": job.seed,
        "about": ready.task.about,
        "answer": recipe.answer.__name__,
        "metrics": _stored(metrics),
        "best": None if best is None else _stored(measure(ready.task, best, living)),
        "log_z": log_z,
        "log_z_error": error,
        "rows": dict(result.rows),
        "saved": dict(result.saved),
        "seconds": round(seconds, 3),
        "job": job.stored(),
        "resolved": resolved(ready),
        **({"counts": counts} if counts else {}),
        **_extras(ready, kept),
        **_alphabet(ready, result),
    }


PILOTED = ("draws", "ramp", "noise", "smoothing", "trigger", "resample")
"""What pilots choose."""


def settled(ready: PreparedJob) -> dict[str, Any]:
    """A job for config.json: its settings, and where it has none those of the task and the method. What pilots choose
    is added when its row is written."""
    known = resolved(ready)
    found = {name: known[name] for name in known if not ready.recipe.planned or name not in PILOTED}
    return found | ready.job.stored()


def resolved(ready: PreparedJob) -> dict[str, Any]:
    """The settings that a job was run with, where it left some to the task or the method. `draws` is 0 where estimates
    have a closed form; what a method has not, such as a ramp without a twist or the reward with guidance alone, is left
    out."""
    job, task, method = ready.job, ready.task, ready.method
    steps = method.steering.model.steps
    proposal, twist = method.steering.proposal, method.steering.twist
    found: dict[str, Any] = {"steps": len(steps), "seed": job.seed}
    guided = ready.guides and task.guidance is not None
    if not guided or isinstance(twist, Tilt):
        rewards = list(TASKS[task.name].rewards) if task.name in TASKS else []
        found |= {"kl": task.tilt.kl} | ({"reward": task.reward or rewards[0]} if rewards else {})
    found |= {} if task.goal is None else {"goal": task.goal}
    found |= {"guidance": task.guidance} if guided else {}
    found |= {} if task.order is None else {"order": task.order}
    gradients = of_kind(proposal, Gradient)  # a rule is around it
    if gradients and gradients[0].clip is not None:
        found["clip"] = gradients[0].clip
    if learners := learned_parts(proposal):
        found["learned_scale"] = learners[0].scale
    if isinstance(twist, Tilt):
        found |= {"kl": twist.kl, "draws": twist.draws if twist.drawn else 0, "smoothing": twist.smoothing or 0.0}
        found["ramp"] = choices.ramp_name(twist.ramp, steps)
        if isinstance(twist.estimator, Sampled):
            found["noise"] = "fresh" if twist.estimator.random else "shared"
    if ready.recipe.split is None:
        found["trigger"] = choices.trigger_name(method.when)
        if method.when is not never:
            found["resample"] = choices.scheme_name(method.resample)
    return found


def _stored(metrics: Mapping[str, Measured]) -> dict[str, list[float | None]]:
    return {name: stored(value) for name, value in metrics.items()}


def _alphabet(ready: PreparedJob, result: Result) -> dict[str, Any]:
    """What a report needs to show the stored states: the mask, and for texts the pieces that occur."""
    if result.states is None:
        return {}
    mask, piece = ready.method.steering.model.kernel.mask_id, ready.task.piece
    found: dict[str, Any] = {} if mask < 0 else {"mask": mask}  # there is none under uniform noise
    if piece is not None:
        tokens = (int(token) for token in result.states.flatten().bincount().nonzero())
        found["pieces"] = {str(token): piece(token) for token in tokens if token != mask}
    return found


def _extras(ready: PreparedJob, kept: Tensor) -> dict[str, Any]:
    """Entries that not every row has: the training behind the method, what a plan chose and why, failed prompts, and
    populations that died."""
    found: dict[str, Any] = {}
    prompted, trained = ready.task.prompted, ready.recipe.trained
    if ready.chosen is not None and ready.chosen.winner.setting.names["proposal"] == LEARNED:
        trained = learned
    if trained is not None:
        card = trained(ready.task).card
        if (other := other_reward(ready.task, card)) is not None:
            found["learned for"] = other
        found["training"] = {name: card[name] for name in ("denoiser rows", "seconds", "device", "history")}
    if ready.chosen is not None:
        found["plan"] = {
            **ready.chosen.reasons,
            "particles": f"{ready.chosen.num_particles}, what the rest of the budget pays for",
        }
    elif ready.job.why is not None:
        found["plan"] = {"particles": ready.job.why}
    if prompted is not None and prompted.failed:
        failed = prompted.failed
        found["failed"] = [{"prompt": prompt.text, "id": prompt.id, "error": reason} for prompt, reason in failed]
    if not kept.all():
        found["dead"] = int((~kept).sum())
        asked = () if prompted is None else prompted.prompts
        own = kept.view(max(1, len(asked)), -1)
        lost = [prompt.id for prompt, alive in zip(asked, own, strict=False) if not alive.any()]
        found |= {"dead prompts": lost} if lost else {}
    return found
