"""Training of the task `cifar`: the tokeniser, the denoiser of its tokens, and two classifiers of images."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from tokensteer.tasks.cifar import classifiers
from tokensteer.tasks.cifar import denoiser as denoising
from tokensteer.tasks.cifar import tokeniser as tokenising
from tokensteer.tasks.cifar.data import Data, Images, data
from tokensteer.tasks.common import lpips
from tokensteer.tasks.common.checkpoints import Checkpoints
from tokensteer.tasks.common.part import INT8, Part, Pieces, finish_cards, go_on
from tokensteer.tasks.common.task import check_device, weights_file
from tokensteer.tasks.common.training import Training
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


def train(training: Training, recipe: Recipe = RECIPE) -> dict[str, Any]:
    """Train, store and measure all networks. A killed training continues if it is called with the same options."""
    training.begin()
    images, cards = data(), {part: weights_file(training.out, NAME, part).with_suffix(".json") for part in PARTS}
    kept = {part: Checkpoints(training.checkpoints, f"{NAME}-{part}") for part in PARTS}
    for part in PARTS:
        if part == "tokeniser" and cards[part].is_file() and kept["denoiser"].load() is not None:
            continue  # the denoiser that was begun is of this tokeniser
        minutes = None if training.minutes is None else training.minutes * SHARES[part]
        train_part(part, *go_on(training, kept[part], minutes), recipe, images)
    found = finish_cards(cards, kept.values())
    training.tidy()
    return found


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
    own = Part(NAME, part, PARTS.index(part), training, pieces)
    if make is None:
        return _classifier(own, recipe, classifiers.half(seen, part), unseen, few)
    return make(own, recipe, seen, unseen, few)


def _tokeniser(part: Part, recipe: Recipe, seen: Images, unseen: Images, few: Images) -> dict[str, float]:
    training = part.training
    net = FSQ(recipe.tokeniser).to(training.device)
    distance = lpips.load(training.device) if recipe.perceptual else None
    trainee = tokenising.TokeniserTraining(
        net, seen, few, distance, recipe.tokeniser_plan, recipe.adversarial, part.compiled
    )
    progress = part.run(trainee, recipe.tokeniser_plan)
    trainee.best.put_into(trainee.learner.average)
    save(trainee.learner.average, part.file, torch.bfloat16)
    stored = load(part.file, training.device)
    quality = tokenising.measure(stored, unseen, distance)
    card = {
        "config": asdict(recipe.tokeniser),
        "plan": asdict(recipe.tokeniser_plan),
        "adversarial": recipe.adversarial,
    }
    return part.finish(stored, progress, SOURCE, card, quality)


def _denoiser(part: Part, recipe: Recipe, seen: Images, unseen: Images, few: Images) -> dict[str, float]:
    training = part.training
    first = load(weights_file(part.pieces.weights or training.out, NAME, "tokeniser"), training.device)
    assert isinstance(first, FSQ)
    config = replace(recipe.denoiser, vocab_size=first.config.num_codes + 1)
    net = build(config).to(training.device)
    assert isinstance(net, GridTransformer)
    trainee = denoising.DenoiserTraining(net, first, seen, few, recipe.denoiser_plan, part.compiled)
    progress = part.run(trainee, recipe.denoiser_plan)
    save(trainee.learner.average, part.file, torch.int8)
    stored = load(part.file, training.device)
    ids, labels = denoising.tokens(first, unseen, mirrored=False)
    nats = denoising.measure(stored, ids, labels, trainee.mask)
    trained = denoising.measure(trainee.learner.average, ids, labels, trainee.mask)
    card = {
        "config": asdict(config),
        "plan": asdict(recipe.denoiser_plan),
        "tokeniser": trainee.given["tokeniser"],
        "stored": INT8,
    }
    named = {**nats, "unseen, before int8": trained["unseen"]}
    quality = {f"nats per masked site, {name}": value for name, value in named.items()}
    return part.finish(stored, progress, SOURCE, card, quality)


def _classifier(part: Part, recipe: Recipe, seen: Images, unseen: Images, few: Images) -> dict[str, float]:
    training, rewards = part.training, part.name == "reward"
    config, plan = (recipe.reward, recipe.reward_plan) if rewards else (recipe.judge, recipe.judge_plan)
    net = build(config).to(training.device)
    trainee = classifiers.ClassifierTraining(net, seen, few, plan, part.compiled)
    progress = part.run(trainee, plan)
    save(trainee.learner.average, part.file, torch.int8)
    stored = load(part.file, training.device)
    quality = classifiers.measure(stored, unseen)
    quality["test accuracy, before int8"] = classifiers.measure(trainee.learner.average, unseen)["test accuracy"]
    tokeniser = weights_file(part.pieces.weights or training.out, NAME, "tokeniser")
    if tokeniser.is_file():
        first = load(tokeniser, training.device)
        assert isinstance(first, FSQ)
        decoded = classifiers.measure(stored, unseen, first)
        quality["test accuracy, of reconstructions"] = decoded["test accuracy"]
    card = {
        "config": asdict(config),
        "plan": asdict(plan),
        "images": f"{len(seen.pixels)}, at {'even' if rewards else 'odd'} places of the training images",
        "stored": INT8,
    }
    return part.finish(stored, progress, SOURCE, card, quality)


def _first(images: Images, count: int) -> Images:
    return Images(images.pixels[:count], images.labels[:count])
