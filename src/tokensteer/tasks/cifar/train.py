"""Training of the task `cifar`: the tokeniser, the denoiser of its tokens, and two classifiers of images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tokensteer.tasks.cifar import classifiers
from tokensteer.tasks.cifar import denoiser as denoising
from tokensteer.tasks.cifar.data import Data, Images, data
from tokensteer.tasks.common import image_tokeniser as tokenising
from tokensteer.tasks.common import lpips
from tokensteer.tasks.common.grid_denoiser import untrained
from tokensteer.tasks.common.part_training import INT8, PartTraining, Pieces, train_parts
from tokensteer.tasks.common.training import Training
from tokensteer.tasks.nets import (
    FSQ,
    FSQConfig,
    GridTransformerConfig,
    MixerConfig,
    ResNetConfig,
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
    """Networks and plans. `adversarial` adds a discriminator to the training of the tokeniser, and `noise` is the
    largest share of an image's codes that are replaced before it decodes them."""

    tokeniser: FSQConfig = denoising.TOKENISER
    denoiser: GridTransformerConfig = denoising.CONFIG
    tokeniser_plan: Plan = tokenising.PLAN
    denoiser_plan: Plan = denoising.PLAN
    adversarial: bool = False
    perceptual: bool = True
    reward: ResNetConfig = classifiers.REWARD
    judge: MixerConfig = classifiers.JUDGE
    reward_plan: Plan = classifiers.REWARD_PLAN
    judge_plan: Plan = classifiers.JUDGE_PLAN
    noise: float = denoising.NOISE


RECIPE = Recipe()


def train(training: Training, recipe: Recipe = RECIPE) -> dict[str, Any]:
    """Train, store and measure all networks. A killed training continues if it is called with the same options."""
    images = data()

    def part(name: str, training: Training, pieces: Pieces) -> dict[str, float]:
        return train_part(name, training, pieces, recipe, images)

    return train_parts(NAME, SHARES, training, part)


def train_part(
    part: str, training: Training, pieces: Pieces, recipe: Recipe = RECIPE, images: Data | None = None
) -> dict[str, float]:
    """Train one part for `training.minutes`, store and measure it, and leave a checkpoint to go on from."""
    work = PartTraining(NAME, PARTS, part, training, pieces, SOURCE)
    work.begin()
    images = data() if images is None else images
    seen = images.train.to(training.device)
    unseen, few = images.test.to(training.device), _first(images.test, CHECKED).to(training.device)
    make = {"tokeniser": _tokeniser, "denoiser": _denoiser}.get(part)
    if make is None:
        return _classifier(work, recipe, classifiers.half(seen, part), unseen, few)
    return make(work, recipe, seen, unseen, few)


def _tokeniser(work: PartTraining, recipe: Recipe, seen: Images, unseen: Images, few: Images) -> dict[str, float]:
    net = FSQ(recipe.tokeniser).to(work.device)
    distance = lpips.load(work.device) if recipe.perceptual else None
    plan = recipe.tokeniser_plan
    trainee = tokenising.TokeniserTraining(
        net, seen, few, distance, plan, recipe.adversarial, work.compiled, recipe.noise
    )
    progress = work.run(trainee, plan)
    trainee.best.put_into(trainee.learner.average)
    stored = work.store(trainee.learner.average, torch.bfloat16)
    quality = tokenising.measure(stored, unseen, distance)
    more = {"adversarial": recipe.adversarial, "noise": recipe.noise}
    return work.finish(progress, stored, recipe.tokeniser, plan, quality, more)


def _denoiser(work: PartTraining, recipe: Recipe, seen: Images, unseen: Images, few: Images) -> dict[str, float]:
    first = work.stored("tokeniser")
    assert isinstance(first, FSQ)
    config, plan = replace(recipe.denoiser, vocab_size=first.config.num_codes + 1), recipe.denoiser_plan
    net, before = untrained(work, config, first)
    trainee = denoising.DenoiserTraining(net, first, seen, few, plan, work.compiled)
    progress = work.run(trainee, plan)
    stored = work.store(trainee.learner.average)
    ids, labels = denoising.tokens(first, unseen, mirrored=False)
    nats = denoising.measure(stored, ids, labels, trainee.mask)
    trained = denoising.measure(trainee.learner.average, ids, labels, trainee.mask)
    named = {**nats, "unseen, before int8": trained["unseen"]}
    quality = {f"nats per masked site, {name}": value for name, value in named.items()}
    more = {"tokeniser": trainee.given["tokeniser"], "stored": INT8, **before}
    return work.finish(progress, stored, config, plan, quality, more)


def _classifier(work: PartTraining, recipe: Recipe, seen: Images, unseen: Images, few: Images) -> dict[str, float]:
    reward = work.part == "reward"
    config, plan = (recipe.reward, recipe.reward_plan) if reward else (recipe.judge, recipe.judge_plan)
    net = build(config).to(work.device)
    trainee = classifiers.ClassifierTraining(net, seen, few, plan, work.compiled)
    progress = work.run(trainee, plan)
    stored = work.store(trainee.learner.average)
    quality = classifiers.measure(stored, unseen)
    quality["test accuracy, before int8"] = classifiers.measure(trainee.learner.average, unseen)["test accuracy"]
    if work.file("tokeniser").is_file():
        first = work.stored("tokeniser")
        assert isinstance(first, FSQ)
        decoded = classifiers.measure(stored, unseen, first)
        quality["test accuracy, of reconstructions"] = decoded["test accuracy"]
    halves = f"{len(seen.pixels)}, at {'even' if reward else 'odd'} places of the training images"
    return work.finish(progress, stored, config, plan, quality, {"images": halves, "stored": INT8})


def _first(images: Images, count: int) -> Images:
    return Images(images.pixels[:count], images.labels[:count])
