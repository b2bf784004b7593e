"""Training of the tasks of texts."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokensteer.core.steering.methods import pretrained
from tokensteer.tasks.common.arrays import Examples, to_lists
from tokensteer.tasks.common.metrics import Classifier, Measured, accuracy, in_parts, measured, nll_bound
from tokensteer.tasks.common.proposals import ProposalTraining
from tokensteer.tasks.common.task import SHIPPED, Setup
from tokensteer.tasks.common.training import Network, Training, Trial, train_networks
from tokensteer.tasks.common.wordpiece import WordPiece
from tokensteer.tasks.text.data import Reviews
from tokensteer.tasks.text.recipe import NUM_STEPS, Recipe, as_denoiser, augment, canvas, model, reader, task
from tokensteer.train import classifier_loss, headed_loss

SHARES = (0.9, 0.05, 0.05)  # of the time, for denoiser, reward and judge
MEASURED = {1: 75, 8: 75}  # populations for each number of particles, multiples of the number of prompts
ROWS = 20  # sequences whose (L, V) tables are in memory together, each several times
TRIAL = Trial(examples=4000, num_steps=NUM_STEPS)


def train(
    recipe: Recipe, training: Training, trial: Trial = TRIAL, roles: Sequence[str] | None = None
) -> dict[str, Any]:
    """Train, store and measure denoiser, reward and judge, or some `roles` if the folder holds the others."""
    reviews = recipe.data()
    pieces, known = len(reviews.vocabulary.pieces), recipe.denoiser.vocab_size
    if pieces != known:
        raise ValueError(f"the data has {pieces} pieces and the networks {known}: make the data with --size {known}")
    reviews.vocabulary.write(recipe.vocabulary_file(training.out))
    mask_id = reviews.vocabulary.mask_id
    classify = classifier_loss(augment(mask_id, recipe.dropped, recipe.swapped))
    whole = training.plan(recipe.plans[0], SHARES[0])
    ids = reviews.training.ids
    networks = {"denoiser": Network(recipe.denoiser, headed_loss(mask_id), whole, ids, card={"windows": len(ids)})}
    for place, (role, config) in enumerate((("reward", recipe.reward), ("judge", recipe.judge)), 1):
        plan, windows = training.plan(recipe.plans[place], SHARES[place]), reviews.parts[role]
        plan = replace(plan, steps=min(plan.steps, recipe.plans[place].steps))  # with more steps classifiers overfit
        extra = {"windows": len(windows.ids)}
        networks[role] = Network(config, classify, plan, windows.ids, windows.labels, extra)
    measure = partial(_measure, recipe, reviews, training, trial)
    return train_networks(training, recipe.name, recipe.source, networks, measure, roles)


def proposal(
    recipe: Recipe, goal: int | None = None, weights: Path = SHIPPED, populations: Mapping[int, int] = MEASURED
) -> ProposalTraining:
    """Training of a proposal for the goal, praise unless given, on the default prompts. `populations` are those of all
    prompts together."""
    goal = 1 if goal is None else goal
    wrap = as_denoiser(WordPiece.read(recipe.vocabulary_file(weights)).mask_id)
    return ProposalTraining(partial(task, recipe), goal, weights, recipe.proposal, wrap, populations)


def _measure(recipe: Recipe, reviews: Reviews, training: Training, trial: Trial) -> dict[str, Any]:
    """The quality of each network, with a few texts of the model."""
    setup = Setup(trial.num_steps, device=training.device, weights=training.out)
    generator, vocabulary = training.generator(100), reviews.vocabulary
    mask_id = vocabulary.mask_id
    prior = model(setup, setup.load(recipe.name, "denoiser"), [canvas("", vocabulary, recipe.length)], mask_id)
    judge = reader(recipe, "judge", setup)
    seen, unseen = (_some(part, trial.examples, setup.device) for part in (reviews.training, reviews.parts["test"]))
    learned, bound = (
        nll_bound(prior.denoiser, part.ids, mask_id, generator=generator, rows=ROWS).times(math.log(2))
        for part in (seen, unseen)
    )
    began = time.perf_counter()
    samples = pretrained(prior)(1, trial.samples, generator=generator).samples[:, 0]
    found: dict[str, Any] = {
        "denoiser": {
            "nats per token": bound.numbers(),
            "perplexity, at most": round(math.exp(bound.mean), 2),
            "nats per token of what it learned from": learned.numbers(),
            "nats per token of single tokens": _unigram(reviews, unseen.ids),
            "test windows": len(unseen.ids),
            "seconds of sampling": round(time.perf_counter() - began, 2),
            "samples": len(samples),
            "praise among samples": _praise(judge, samples).numbers(),
            "praise among test windows": _praise(judge, unseen.ids).numbers(),
            "texts": [vocabulary.decode(ids) for ids in to_lists(samples[:8])],
        }
    }
    for role in ("reward", "judge"):
        found[role] = {
            "test accuracy": accuracy(reader(recipe, role, setup), unseen.ids, unseen.labels).numbers(),
            "test windows": len(unseen.ids),
        }
    return found


def _some(part: Examples, count: int, device: str) -> Examples:
    """At most `count` windows at equal distances, because neighbouring windows overlap."""
    index = torch.linspace(0, len(part.ids) - 1, min(count, len(part.ids))).long()
    return Examples(part.ids[index].long().to(device), part.labels[index].to(device))


def _unigram(reviews: Reviews, ids: Tensor) -> float:
    """Nats per token of ids under the frequencies of single tokens."""
    counts = torch.bincount(reviews.training.ids.flatten().long(), minlength=len(reviews.vocabulary.pieces)) + 1.0
    return round(float(-(counts / counts.sum()).log()[ids.cpu()].mean()), 4)


def _praise(judge: Classifier, ids: Tensor) -> Measured:
    return measured(in_parts(judge, ids).argmax(-1).double())
