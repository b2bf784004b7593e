"""Training of the binary image tasks."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokensteer.core.steering.methods import pretrained, smc_base, smc_grad
from tokensteer.tasks.common.arrays import Examples
from tokensteer.tasks.common.metrics import accuracy, hamming, label_histogram, nll_bound
from tokensteer.tasks.common.proposals import ProposalTraining
from tokensteer.tasks.common.task import SHIPPED, Setup
from tokensteer.tasks.common.training import Network, Training, Trial, measure_methods, train_networks
from tokensteer.tasks.images.recipe import CLASSES, DIGIT, MASK, Recipe, as_denoiser, augment, model, picture, task
from tokensteer.train import classifier_loss, masked_loss

MEASURED = {1: 200, 4: 60, 16: 30}  # populations for each number of particles
SHARES = (0.75, 0.1, 0.15)  # of the time, for denoiser, reward and judge


def train(recipe: Recipe, training: Training, trial: Trial | None = None) -> dict[str, Any]:
    """Train, store and measure denoiser, reward and judge."""
    trial = Trial() if trial is None else trial
    data, setup = recipe.data(), Setup(trial.num_steps, device=training.device, weights=training.out)
    plans = [training.plan(plan, share) for plan, share in zip(recipe.plans, SHARES, strict=True)]
    classify = classifier_loss(augment(recipe.side, recipe.shift, recipe.flips))
    ids, labels = data.train.ids, data.train.labels
    real = [round(float(hamming(data.test.ids[data.test.labels == k]).mean()), 5) for k in range(CLASSES)]
    networks = {
        "denoiser": Network(recipe.denoiser, masked_loss(MASK), plans[0], ids, card={"hamming": real}),
        "reward": Network(recipe.reward, classify, plans[1], ids, labels),
        "judge": Network(recipe.judge, classify, plans[2], ids, labels),
    }

    def measure() -> dict[str, Any]:
        found, samples = _measure(recipe, setup, data.test, training, trial)
        found["steering"], drawn = _steer(recipe, setup, training, trial)
        picture(torch.cat([samples[:128], *drawn]), recipe.side, training.out / f"{recipe.name}-samples.png")
        return found

    return train_networks(training, recipe.name, recipe.source, networks, measure)


def proposal(
    recipe: Recipe, goal: int | None = None, weights: Path = SHIPPED, populations: Mapping[int, int] = MEASURED
) -> ProposalTraining:
    """Training of a proposal for the digit `goal`, 4 unless given."""
    goal = DIGIT if goal is None else goal
    return ProposalTraining(partial(task, recipe), goal, weights, recipe.proposal, as_denoiser, populations)


def _measure(
    recipe: Recipe, setup: Setup, test: Examples, training: Training, trial: Trial
) -> tuple[dict[str, Any], Tensor]:
    """The quality of each network, and unconditional samples (P, L)."""
    generator = training.generator(100)
    ids, labels = test.ids[: trial.examples].to(setup.device).long(), test.labels[: trial.examples]
    prior, judge = model(recipe, setup), setup.load(recipe.name, "judge")
    bits = nll_bound(prior.denoiser, ids, MASK, generator=generator)
    began = time.perf_counter()
    samples = pretrained(prior)(1, trial.samples, generator=generator).samples[:, 0]
    found: dict[str, Any] = {
        "denoiser": {
            "bits per pixel": bits.numbers(),
            "nats per image": bits.times(recipe.length * math.log(2)).numbers(),
            "test images": len(ids),
            "samples": len(samples),
            "seconds of sampling": round(time.perf_counter() - began, 2),
            "labels of samples": [round(float(p), 4) for p in label_histogram(judge, samples)],
            "labels of test data": [round(float(p), 4) for p in torch.bincount(labels) / len(ids)],
            "judge's confidence in samples": float(judge(samples[:1000]).exp().amax(-1).mean()),
            "judge's confidence in test data": float(judge(ids[:1000]).exp().amax(-1).mean()),
            "hamming of samples over test data": float(hamming(samples).mean() / hamming(ids).mean()),
        }
    }
    for role in ("reward", "judge"):
        found[role] = {"test accuracy": accuracy(setup.load(recipe.name, role), ids, labels).numbers()}
    return found, samples


def _steer(recipe: Recipe, setup: Setup, training: Training, trial: Trial) -> tuple[dict[str, Any], list[Tensor]]:
    """Two methods at two sizes towards the default goal, and sixteen draws of each for the picture."""
    goal = task(recipe, setup)
    methods = {"smc_base": smc_base(goal.model, goal.tilt), "smc_grad": smc_grad(goal.model, goal.tilt)}
    table: dict[str, Any] = {"goal": DIGIT, "populations": trial.populations, "steps": trial.num_steps}
    drawn: list[Tensor] = []
    sizes: dict[int, int] = {4: trial.populations, 16: trial.populations}
    for name, result, found in measure_methods(goal, methods, sizes, training):
        table[name] = found
        some = result.sample()[:, 0][:16]
        drawn.append(torch.cat([some, some.new_zeros(16 - len(some), some.shape[1])]))
    return table, drawn
