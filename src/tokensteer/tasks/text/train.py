"""All weights of a task of texts by one command, with a card for each and a measure of what they are worth."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Generator, Tensor

from tokensteer.core.numerics.domains import check_wholes
from tokensteer.core.steering.methods import pretrained
from tokensteer.files import write_json
from tokensteer.tasks.common.metrics import Measured, accuracy, in_parts, measured, nll_bound
from tokensteer.tasks.common.proposals import teach, teach_twist
from tokensteer.tasks.common.task import SHIPPED, Setup, Task, read_card
from tokensteer.tasks.common.training import Training, say, train_net
from tokensteer.tasks.nets import load
from tokensteer.tasks.text.data import Reviews, Windows
from tokensteer.tasks.text.recipe import (
    ROLES,
    Recipe,
    as_denoiser,
    augment,
    canvas,
    file_of,
    model,
    reader,
    task,
    vocabulary_of,
)
from tokensteer.tasks.text.wordpiece import WordPiece
from tokensteer.train import classifier_loss, headed_loss

SHARES = (0.9, 0.05, 0.05)
"""Of the time, for denoiser, reward and judge."""
MEASURED = {1: 75, 8: 75}
"""Populations for each number of particles, multiples of the number of prompts."""
ROWS = 20
"""Sequences whose laws over the whole vocabulary are held at once, each several times."""


@dataclass(frozen=True)
class Trial:
    """How much is measured: `samples` of the model, `windows` of the test data."""

    samples: int = 1000
    windows: int = 4000
    num_steps: int = 64

    def __post_init__(self) -> None:
        check_wholes("Trial", 0, **vars(self))
        if min(self.samples, self.windows, self.num_steps) < 2:
            raise ValueError(f"all that is measured needs at least 2 to have an error, got {self}")


def train(
    recipe: Recipe, training: Training, trial: Trial | None = None, roles: Sequence[str] = ROLES
) -> dict[str, Any]:
    """Train, store, measure; of some `roles` alone if the folder holds the others already. A run that was killed goes
    on where it was if it is given the same folder and options."""
    trial = Trial() if trial is None else trial
    reviews, out = recipe.data(), training.out
    if len(reviews.vocabulary.pieces) != recipe.denoiser.vocab_size:
        raise ValueError(
            f"the data is written in {len(reviews.vocabulary.pieces)} pieces and the networks know "
            f"{recipe.denoiser.vocab_size}: make the data with --size {recipe.denoiser.vocab_size}"
        )
    training.begin()
    reviews.vocabulary.write(vocabulary_of(recipe, out))
    parts = {"denoiser": reviews.training, "reward": reviews.parts["reward"], "judge": reviews.parts["judge"]}
    mask_id = reviews.vocabulary.mask_id
    files = {role: file_of(recipe, role, out).with_suffix(".json") for role in ROLES}
    missing = [role for role in ROLES if role not in roles and not files[role].is_file()]
    if missing:
        raise FileNotFoundError(f"there is no {files[missing[0]]} to go with: train {missing[0]} too")
    cards: dict[str, Any] = {}
    for role in ROLES:
        learns = role in roles
        cards[role] = _train_one(recipe, role, parts[role], mask_id, training) if learns else read_card(files[role])
    for role in roles:  # without quality: see `finished`
        write_json(files[role], cards[role])
    say("measuring")
    setup = Setup(trial.num_steps, device=training.device, weights=out)
    found = _measure(recipe, setup, reviews, training, trial)
    write_json(out / f"{recipe.name}-quality.json", found)
    for role in ROLES:
        write_json(files[role], cards[role] | {"quality": found[role]})
    training.tidy(*(file.with_suffix(".safetensors").name for file in files.values()))
    return found


def train_proposal(
    recipe: Recipe,
    training: Training,
    goal: int | None = None,
    weights: Path = SHIPPED,
    populations: Mapping[int, int] = MEASURED,
    twist: bool = False,
) -> dict[str, Any]:
    """Teach a copy of the denoiser in `weights` to write what the goal asks for, praise unless given, on the prompts of
    our own, or the proposal there its `twist`; then measure so many `populations` of all prompts together for each
    number of particles."""
    goal = 1 if goal is None else goal

    def make(kl: float | None, num_steps: int) -> Task:
        return task(recipe, Setup(num_steps, goal, kl, device=training.device, weights=weights))

    net = load(file_of(recipe, "denoiser", weights), training.device)
    wrap = as_denoiser(WordPiece.read(vocabulary_of(recipe, weights)).mask_id)
    if twist:
        return teach_twist(make, wrap, recipe.course, training, goal, populations, weights)
    return teach(make, net, wrap, recipe.course, training, goal, populations, weights)


def _train_one(recipe: Recipe, role: str, windows: Windows, mask_id: int, training: Training) -> dict[str, Any]:
    place, is_denoiser = ROLES.index(role), role == "denoiser"
    plan = training.plan(recipe.plans[place], SHARES[place])
    if not is_denoiser:  # with more steps than its own a classifier learns its reviews by heart
        plan = replace(plan, steps=min(plan.steps, recipe.plans[place].steps))
    config = (recipe.denoiser, recipe.reward, recipe.judge)[place]
    harder = augment(mask_id, recipe.dropped, recipe.swapped)
    loss = headed_loss(mask_id) if is_denoiser else classifier_loss(harder)
    data = windows.ids, None if is_denoiser else windows.labels
    card = train_net(training, recipe.name, role, place, config, loss, data, plan, recipe.source)
    return card | {"windows": len(windows.ids)}


def _measure(recipe: Recipe, setup: Setup, reviews: Reviews, training: Training, trial: Trial) -> dict[str, Any]:
    """What each network is worth, with a few texts of the model."""
    generator = Generator(setup.device).manual_seed(training.seed + 100)
    vocabulary = reviews.vocabulary
    mask_id = vocabulary.mask_id
    net = load(file_of(recipe, "denoiser", setup.weights), setup.device)
    prior = model(setup, net, [canvas("", vocabulary, recipe.length)], mask_id)
    judge = reader(recipe, "judge", setup)
    seen, unseen = (_some(part, trial.windows, setup.device) for part in (reviews.training, reviews.parts["test"]))
    bounds = [
        _nats(nll_bound(prior.denoiser, part.ids, mask_id, generator=generator, rows=ROWS)) for part in (seen, unseen)
    ]
    began = time.perf_counter()
    samples = pretrained(prior)(1, trial.samples, generator=generator).samples[:, 0]
    found: dict[str, Any] = {
        "denoiser": {
            "nats per token": bounds[1].numbers(),
            "perplexity, at most": round(math.exp(bounds[1].mean), 2),
            "nats per token of what it learned from": bounds[0].numbers(),
            "nats per token of single tokens": _unigram(reviews, unseen.ids),
            "test windows": len(unseen.ids),
            "seconds of sampling": round(time.perf_counter() - began, 2),
            "samples": len(samples),
            "praise among samples": _praise(judge, samples).numbers(),
            "praise among test windows": _praise(judge, unseen.ids).numbers(),
            "texts": [vocabulary.decode(cast("list[int]", cast("Any", ids).tolist())) for ids in samples[:8]],
        }
    }
    for role in ("reward", "judge"):
        found[role] = {
            "test accuracy": accuracy(reader(recipe, role, setup), unseen.ids, unseen.labels).numbers(),
            "test windows": len(unseen.ids),
        }
    for role in ROLES:
        say(f"{role}: {json.dumps(found[role])}")
    return found


def _some(part: Windows, count: int, device: str) -> Windows:
    """So many windows, evenly from all of a part, whose windows overlap where they are neighbours."""
    index = torch.linspace(0, len(part.ids) - 1, min(count, len(part.ids))).long()
    return Windows(part.ids[index].long().to(device), part.labels[index].to(device))


def _nats(bits: Measured) -> Measured:
    return Measured(bits.mean * math.log(2), bits.error * math.log(2))


def _unigram(reviews: Reviews, ids: Tensor) -> float:
    """What a token of ids costs a model that knows frequencies alone."""
    counts = torch.bincount(reviews.training.ids.flatten().long(), minlength=len(reviews.vocabulary.pieces)) + 1.0
    return round(float(-(counts / counts.sum()).log()[ids.cpu()].mean()), 4)


def _praise(judge: Any, ids: Tensor) -> Measured:
    return measured(in_parts(judge, ids).argmax(-1).double())
