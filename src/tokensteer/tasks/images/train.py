"""All weights of a task of binary images by one command, with a card for each and a measure of what they are worth."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from tokensteer.core.numerics.domains import check_wholes
from tokensteer.core.steering.methods import Method, pretrained, smc_base, smc_grad
from tokensteer.files import write_json
from tokensteer.tasks.common.metrics import Measured, accuracy, hamming, label_histogram, nll_bound
from tokensteer.tasks.common.proposals import teach, teach_twist
from tokensteer.tasks.common.task import SHIPPED, Setup, Task
from tokensteer.tasks.common.training import Training, say, train_net
from tokensteer.tasks.images.recipe import (
    CLASSES,
    MASK,
    ROLES,
    Data,
    Images,
    Recipe,
    as_denoiser,
    augment,
    classifier,
    file_of,
    model,
    picture,
    task,
)
from tokensteer.tasks.nets import load
from tokensteer.train import classifier_loss, masked_loss

MEASURED = {1: 200, 4: 60, 16: 30}
SHARES = (0.75, 0.1, 0.15)
"""Of the time, for denoiser, reward and judge."""


@dataclass(frozen=True)
class Trial:
    """How much is measured: `samples` of the model, `populations` of each method towards the digit `goal`, `images` of
    the test data."""

    samples: int = 1000
    populations: int = 30
    goal: int = 4
    images: int = 10_000
    num_steps: int = 100

    def __post_init__(self) -> None:
        check_wholes("Trial", 0, **vars(self))
        if min(self.samples, self.populations, self.images, self.num_steps) < 2:
            raise ValueError(f"all that is measured needs at least 2 to have an error, got {self}")
        if not 0 <= self.goal < CLASSES:
            raise ValueError(f"--goal must be a digit from 0 to 9, got {self.goal}")


def train(recipe: Recipe, training: Training, trial: Trial | None = None) -> dict[str, Any]:
    """Train, store, measure. A run that was killed goes on where it was if it is given the same folder and options."""
    trial = Trial() if trial is None else trial
    setup = Setup(trial.num_steps, trial.goal, device=training.device, weights=training.out)
    data, out = recipe.data(), training.out
    training.begin()
    cards = {role: _train_one(recipe, role, data.train, training) for role in ROLES}
    cards["denoiser"]["hamming"] = [
        round(float(hamming(data.test.ids[data.test.labels == k]).mean()), 5) for k in range(CLASSES)
    ]
    places = {role: file_of(recipe, role, out) for role in ROLES}
    for role, file in places.items():  # without quality: see `finished`
        write_json(file.with_suffix(".json"), cards[role])
    say("measuring")
    found, samples = _measure(recipe, setup, data, training, trial)
    found["steering"], drawn = _steer(recipe, setup, training, trial)
    picture(torch.cat([samples[:128], *drawn]), recipe.side, out / f"{recipe.name}-samples.png")
    write_json(out / f"{recipe.name}-quality.json", found)
    for role, file in places.items():
        write_json(file.with_suffix(".json"), cards[role] | {"quality": found[role]})
    training.tidy(*(file.name for file in places.values()))
    return found


def train_proposal(
    recipe: Recipe,
    training: Training,
    goal: int | None = None,
    weights: Path = SHIPPED,
    populations: Mapping[int, int] = MEASURED,
    twist: bool = False,
) -> dict[str, Any]:
    """Teach a copy of the denoiser in `weights` to draw the digit `goal`, 4 unless given, or the proposal there its
    `twist`; then measure so many `populations` for each number of particles."""
    goal = 4 if goal is None else goal

    def make(kl: float | None, num_steps: int) -> Task:
        return task(recipe, Setup(num_steps, goal, kl, device=training.device, weights=weights))

    if twist:
        return teach_twist(make, as_denoiser, recipe.course, training, goal, populations, weights)
    net = load(file_of(recipe, "denoiser", weights), training.device)
    return teach(make, net, as_denoiser, recipe.course, training, goal, populations, weights)


def _train_one(recipe: Recipe, role: str, images: Images, training: Training) -> dict[str, Any]:
    place = ROLES.index(role)
    plan = training.plan(recipe.plans[place], SHARES[place])
    config = (recipe.denoiser, recipe.reward, recipe.judge)[place]
    is_denoiser = role == "denoiser"
    harder = augment(recipe.side, recipe.shift, recipe.flips)
    loss = masked_loss(MASK) if is_denoiser else classifier_loss(harder)
    data = images.ids, None if is_denoiser else images.labels
    return train_net(training, recipe.name, role, place, config, loss, data, plan, recipe.source)


def _measure(
    recipe: Recipe, setup: Setup, data: Data, training: Training, trial: Trial
) -> tuple[dict[str, Any], Tensor]:
    """What each network is worth, and unconditional samples (P, L)."""
    generator = Generator(setup.device).manual_seed(training.seed + 100)
    ids, labels = data.test.ids[: trial.images].to(setup.device).long(), data.test.labels[: trial.images]
    prior, judge = model(recipe, setup), classifier(recipe, "judge", setup)
    bits = nll_bound(prior.denoiser, ids, MASK, generator=generator)
    nats = recipe.length * math.log(2)
    began = time.perf_counter()
    samples = pretrained(prior)(1, trial.samples, generator=generator).samples[:, 0]
    found: dict[str, Any] = {
        "denoiser": {
            "bits per pixel": bits.numbers(),
            "nats per image": Measured(bits.mean * nats, bits.error * nats).numbers(),
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
        found[role] = {"test accuracy": accuracy(classifier(recipe, role, setup), ids, labels).numbers()}
    for role in ROLES:
        say(f"{role}: {json.dumps(found[role])}")
    return found, samples


def _steer(recipe: Recipe, setup: Setup, training: Training, trial: Trial) -> tuple[dict[str, Any], list[Tensor]]:
    """Two methods at two sizes towards the goal, measured; sixteen draws of each for the picture."""
    goal = task(recipe, setup)
    methods: Mapping[str, Method] = {
        "smc_base": smc_base(goal.model, goal.tilt),
        "smc_grad": smc_grad(goal.model, goal.tilt),
    }
    table: dict[str, Any] = {"goal": trial.goal, "populations": trial.populations, "steps": trial.num_steps}
    drawn: list[Tensor] = []
    for name, method in methods.items():
        for particles in (4, 16):
            generator = Generator(setup.device).manual_seed(training.seed + 200)
            began = time.perf_counter()
            result = method(particles, trial.populations, generator=generator)
            marks = {key: value.numbers() for key, value in goal.metrics(result).items()}
            row = {"seconds": round(time.perf_counter() - began, 2), "rows": dict(result.rows)}
            table[f"{name} N={particles}"] = marks | row
            say(f"{name} N={particles}: {json.dumps(marks | row)}")
            some = result.sample()[:, 0][:16]
            drawn.append(torch.cat([some, some.new_zeros(16 - len(some), some.shape[1])]))
    return table, drawn
