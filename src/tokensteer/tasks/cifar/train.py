"""Training of the task `cifar`: the tokeniser, the denoiser of its tokens, and two classifiers of images."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tokensteer.files import write_json
from tokensteer.tasks.cifar import classifiers
from tokensteer.tasks.cifar import denoiser as denoising
from tokensteer.tasks.cifar import tokeniser as tokenising
from tokensteer.tasks.cifar.data import Data, Images, data
from tokensteer.tasks.common import lpips
from tokensteer.tasks.common.checkpoints import Checkpoints
from tokensteer.tasks.common.task import check_device, read_card, weights_file
from tokensteer.tasks.common.timed_loop import Progress, Stretch, Trainee, run
from tokensteer.tasks.common.training import Training, say
from tokensteer.tasks.nets import (
    FSQ,
    FSQConfig,
    GridTransformer,
    GridTransformerConfig,
    MixerConfig,
    ResNetConfig,
    load,
    save,
)
from tokensteer.tasks.nets.store import build
from tokensteer.train import Plan

NAME = "cifar"
PARTS = ("tokeniser", "denoiser", "reward", "judge")
SHARES = {"tokeniser": 0.25, "denoiser": 0.6, "reward": 0.05, "judge": 0.1}
"""Of the minutes, if all parts are trained."""
SOURCE = "CIFAR-10: 50,000 images of 32 x 32 pixels, trained on with their mirror images"
_SO_FAR = "quality of this part"  # until all parts are trained: cards with "quality" are those of a finished training
CHECKED = 2000  # test images of the checks during training


@dataclass(frozen=True)
class Recipe:
    """Networks and plans. `adversarial` adds a discriminator to the training of the tokeniser."""

    tokeniser: FSQConfig = tokenising.CONFIG
    denoiser: GridTransformerConfig = denoising.CONFIG
    tokeniser_plan: Plan = tokenising.PLAN
    denoiser_plan: Plan = denoising.PLAN
    adversarial: bool = False
    perceptual: bool = True
    reward: ResNetConfig = classifiers.REWARD
    judge: MixerConfig = classifiers.JUDGE
    reward_plan: Plan = classifiers.REWARD_PLAN
    judge_plan: Plan = classifiers.JUDGE_PLAN


RECIPE = Recipe()


@dataclass(frozen=True)
class Pieces:
    """A training in several runs: `resume` the checkpoint of a folder, `horizon` minutes in all of them together.
    `weights` is the folder of the tokeniser, `out` if None."""

    resume: Path | None = None
    horizon: float | None = None
    weights: Path | None = None
    exact: bool = False


def train(training: Training, recipe: Recipe = RECIPE) -> dict[str, Any]:
    """Train, store and measure all networks. A killed training continues if it is called with the same options."""
    training.begin()
    images, cards = data(), {part: weights_file(training.out, NAME, part).with_suffix(".json") for part in PARTS}
    kept = {part: Checkpoints(training.checkpoints, f"{NAME}-{part}") for part in PARTS}
    for part in PARTS:
        if part == "tokeniser" and cards[part].is_file() and kept["denoiser"].load() is not None:
            continue  # the denoiser that was begun is of this tokeniser
        minutes = None if training.minutes is None else training.minutes * SHARES[part]
        left = kept[part].load()
        pieces = Pieces(None if left is None else training.checkpoints, minutes, exact=training.device == "cpu")
        if minutes is not None and left is not None:
            minutes = max(1e-3, minutes - left[1]["seconds"] / 60)
        train_part(part, replace(training, minutes=minutes), pieces, recipe, images)
        _rename(cards[part], "quality", _SO_FAR)
    found = {part: _rename(card, _SO_FAR, "quality") for part, card in cards.items()}
    for checkpoints in kept.values():
        checkpoints.remove()
    training.tidy()
    return found


def _rename(card: Path, entry: str, name: str) -> Any:
    """Give an entry of a card another name; returns its value."""
    entries = read_card(card)
    value = entries.pop(entry)
    write_json(card, {**entries, name: value})
    return value


def train_part(
    part: str, training: Training, pieces: Pieces, recipe: Recipe = RECIPE, images: Data | None = None
) -> dict[str, float]:
    """Train one part for `training.minutes`, store and measure it, and leave a checkpoint to go on from."""
    if part not in PARTS:
        raise ValueError(f"there is no part {part}: give {' or '.join(PARTS)}")
    check_device(training.device)
    if torch.device(training.device).type == "cuda":
        torch.backends.cudnn.benchmark = True  # the shapes never change
        torch.set_float32_matmul_precision("high")
    training.begin()
    images = data() if images is None else images
    seen = images.train.to(training.device)
    unseen, few = images.test.to(training.device), _first(images.test, CHECKED).to(training.device)
    training.seed_torch(PARTS.index(part))
    make = {"tokeniser": _tokeniser, "denoiser": _denoiser}.get(part)
    if make is None:
        return _classifier(part, training, pieces, recipe, classifiers.half(seen, part), unseen, few)
    return make(training, pieces, recipe, seen, unseen, few)


def _tokeniser(
    training: Training, pieces: Pieces, recipe: Recipe, seen: Images, unseen: Images, few: Images
) -> dict[str, float]:
    net = FSQ(recipe.tokeniser).to(training.device)
    distance = lpips.load(training.device) if recipe.perceptual else None
    trainee = tokenising.TokeniserTraining(
        net, seen, few, distance, recipe.tokeniser_plan, recipe.adversarial, _compiles(training)
    )
    progress = _run("tokeniser", trainee, recipe.tokeniser_plan, training, pieces)
    trainee.best.put_into(trainee.learner.average)
    file = weights_file(training.out, NAME, "tokeniser")
    save(trainee.learner.average, file, torch.bfloat16)
    stored = load(file, training.device)
    quality = tokenising.measure(stored, unseen, distance)
    card = {
        "config": asdict(recipe.tokeniser),
        "plan": asdict(recipe.tokeniser_plan),
        "adversarial": recipe.adversarial,
    }
    return _finish("tokeniser", training, progress, stored, card, quality)


def _denoiser(
    training: Training, pieces: Pieces, recipe: Recipe, seen: Images, unseen: Images, few: Images
) -> dict[str, float]:
    first = load(weights_file(pieces.weights or training.out, NAME, "tokeniser"), training.device)
    assert isinstance(first, FSQ)
    config = replace(recipe.denoiser, vocab_size=first.config.num_codes + 1)
    net = build(config).to(training.device)
    assert isinstance(net, GridTransformer)
    trainee = denoising.DenoiserTraining(net, first, seen, few, recipe.denoiser_plan, _compiles(training))
    progress = _run("denoiser", trainee, recipe.denoiser_plan, training, pieces)
    file = weights_file(training.out, NAME, "denoiser")
    save(trainee.learner.average, file, torch.int8)
    stored = load(file, training.device)
    ids, labels = denoising.tokens(first, unseen, mirrored=False)
    nats = denoising.measure(stored, ids, labels, trainee.mask)
    trained = denoising.measure(trainee.learner.average, ids, labels, trainee.mask)
    card = {
        "config": asdict(config),
        "plan": asdict(recipe.denoiser_plan),
        "tokeniser": trainee.given["tokeniser"],
        "stored": "int8 by output channel, vectors bfloat16; exponential moving average of the weights",
    }
    named = {**nats, "unseen, before int8": trained["unseen"]}
    quality = {f"nats per masked site, {name}": value for name, value in named.items()}
    return _finish("denoiser", training, progress, stored, card, quality)


def _classifier(
    part: str, training: Training, pieces: Pieces, recipe: Recipe, seen: Images, unseen: Images, few: Images
) -> dict[str, float]:
    config, plan = (recipe.reward, recipe.reward_plan) if part == "reward" else (recipe.judge, recipe.judge_plan)
    net = build(config).to(training.device)
    trainee = classifiers.ClassifierTraining(net, seen, few, plan, _compiles(training))
    progress = _run(part, trainee, plan, training, pieces)
    file = weights_file(training.out, NAME, part)
    save(trainee.learner.average, file, torch.int8)
    stored = load(file, training.device)
    quality = classifiers.measure(stored, unseen)
    quality["test accuracy, before int8"] = classifiers.measure(trainee.learner.average, unseen)["test accuracy"]
    tokeniser = weights_file(pieces.weights or training.out, NAME, "tokeniser")
    if tokeniser.is_file():
        first = load(tokeniser, training.device)
        assert isinstance(first, FSQ)
        decoded = classifiers.measure(stored, unseen, first)
        quality["test accuracy, of reconstructions"] = decoded["test accuracy"]
    card = {
        "config": asdict(config),
        "plan": asdict(plan),
        "images": f"{len(seen.pixels)}, at {'even' if part == 'reward' else 'odd'} places of the training images",
        "stored": "int8 by output channel, vectors bfloat16; exponential moving average of the weights",
    }
    return _finish(part, training, progress, stored, card, quality)


def _run(part: str, trainee: Trainee, plan: Plan, training: Training, pieces: Pieces) -> Progress:
    plan = replace(plan, steps=max(1, round(plan.steps * training.scale)))
    stretch = Stretch(
        training.checkpoints,
        pieces.resume,
        None if training.minutes is None else 60 * training.minutes,
        None if pieces.horizon is None else 60 * pieces.horizon,
        compact=not pieces.exact,
    )
    return run(trainee, plan, training.generator(PARTS.index(part)), f"{NAME}-{part}", stretch)


def _finish(
    part: str,
    training: Training,
    progress: Progress,
    net: nn.Module,
    more: dict[str, Any],
    quality: dict[str, float],
) -> dict[str, float]:
    """Write the card."""
    command = f"python -m tokensteer.tasks.{NAME} --part {part}"
    card = {
        **training.card(f"{part} of the task {NAME}", command, SOURCE),
        "steps": progress.step,
        "seconds": round(progress.seconds, 1),
        "parameters": sum(p.numel() for p in net.parameters()),
        "last": {name: round(value, 5) for name, value in progress.shown.items()},
        **more,
        "quality": quality,
    }
    write_json(weights_file(training.out, NAME, part).with_suffix(".json"), card)
    say(f"{part}: {json.dumps(quality)}")
    return quality


def _compiles(training: Training) -> bool:
    return training.device.startswith("cuda")


def _first(images: Images, count: int) -> Images:
    return Images(images.pixels[:count], images.labels[:count])
