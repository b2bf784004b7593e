"""The tasks of binary images of digits, `digits` and `mnist`.

Ids 0 and 1 are white and black, 2 is the mask. The reward is log p(y | x) of a convolutional classifier for one digit
y, so with kl = 1 the target p(x) · p(y | x) is the model's own posterior of that digit. The judge is a transformer over
patches, by which nothing is steered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Generator, Tensor, nn

from tokensteer.core.models.denoiser import Denoiser, from_logits
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.template import template
from tokensteer.core.particles.result import Result
from tokensteer.core.twists.ramps import Ramp
from tokensteer.core.twists.ramps import exponential as exponential_ramp
from tokensteer.core.twists.tilt import Tilt
from tokensteer.tasks.common import arrays as arrays_in
from tokensteer.tasks.common import learned
from tokensteer.tasks.common.arrays import Examples
from tokensteer.tasks.common.metrics import Classifier, Measured, ess_share, hamming, in_parts, measured, weighted
from tokensteer.tasks.common.png import tiled, write_png
from tokensteer.tasks.common.proposals import ProposalConfig
from tokensteer.tasks.common.task import Setup, Task, read_card, weights_file
from tokensteer.tasks.nets import ConvConfig, PatchConfig, UNetConfig
from tokensteer.train import Plan

MASK = 2
VOCAB_SIZE = 3
CLASSES = 10
DIGIT = 4  # the goal unless another is given
RAMP = exponential_ramp(100)
"""The paper's, min(1.05^i - 1, 1) at the i-th of a hundred steps: 1 after a seventh of the time, for any number."""


@dataclass(frozen=True)
class Data:
    train: Examples
    test: Examples


@dataclass(frozen=True)
class Recipe:
    """What differs between these tasks: images, networks, plans for denoiser, reward and judge.

    Classifiers are trained on images shifted by up to `shift` pixels in which a share `flips` of the pixels is wrong,
    so that steering cannot please them by a few odd pixels.
    """

    name: str
    side: int
    data: Callable[[], Data]
    denoiser: UNetConfig
    reward: ConvConfig
    judge: PatchConfig
    plans: tuple[Plan, Plan, Plan]
    proposal: ProposalConfig
    shift: int
    flips: float
    source: str

    @property
    def length(self) -> int:
        return self.side * self.side


def unpack(file: Path, length: int) -> Data:
    """Images from packed bits: train (D, L/8), train_y, test, test_y."""
    arrays = arrays_in.read(file, ("train", "train_y", "test", "test_y"), "make it again")

    def images(part: str) -> Examples:
        bits = np.unpackbits(arrays[part], axis=1)[:, :length]
        return Examples(torch.as_tensor(bits), torch.as_tensor(arrays[f"{part}_y"].astype(np.int64)))

    return Data(images("train"), images("test"))


def model(recipe: Recipe, setup: Setup) -> Diffusion:
    """The trained denoiser as an ancestral sampler."""
    return setup.diffusion(as_denoiser(setup.load(recipe.name, "denoiser")), MASK, template(recipe.length, MASK))


def as_denoiser(net: nn.Module) -> Denoiser:
    return from_logits(net, MASK, ignores_time=True)


def tilt(reward: Classifier, digit: int, ramp: Ramp = RAMP, kl: float = 1.0, draws: int = 10) -> Tilt:
    """The target p(x) · p(digit | x)^(1/kl)."""
    if not 0 <= digit < CLASSES:
        raise ValueError(f"the goal must be a digit from 0 to 9, got {digit}")

    def certainty(x: Tensor) -> Tensor:
        return reward(x)[:, digit]

    return Tilt(certainty, kl, ramp, draws, differentiable=True)


def task(recipe: Recipe, setup: Setup) -> Task:
    """Towards the digit `setup.goal`, 4 unless given."""
    setup.refuse_reward(recipe.name)
    digit = DIGIT if setup.goal is None else setup.goal
    reward, judge = (setup.load(recipe.name, role) for role in ("reward", "judge"))
    file = weights_file(setup.weights, recipe.name, "denoiser").with_suffix(".json")
    real = read_card(file).get("hamming")
    if not isinstance(real, list) or len(cast("list[Any]", real)) != CLASSES:
        raise ValueError(f"{file} is damaged, it lacks hamming, {CLASSES} numbers: train the denoiser again")

    def marks(ids: Tensor) -> Tensor:
        return (in_parts(judge, ids).argmax(-1) == digit).double()

    def metrics(result: Result) -> Mapping[str, Measured]:
        rewarded = (in_parts(reward, result.samples.flatten(0, 1)).argmax(-1) == digit).double()
        return assess(result, marks, rewarded, float(cast("list[float]", real)[digit]))

    return Task(
        recipe.name,
        f"digits of {recipe.side} x {recipe.side} binary pixels, towards {digit}",
        model(recipe, setup),
        tilt(reward, digit, kl=1.0 if setup.kl is None else setup.kl),
        metrics,
        lambda ids, file: picture(ids, recipe.side, file),
        marks,
        learned=lambda: learned.find(setup.weights, recipe.name, digit, as_denoiser, setup.device),
        goal=digit,
    )


def assess(result: Result, marks: Callable[[Tensor], Tensor], rewarded: Tensor, real: float) -> dict[str, Measured]:
    """Means over populations. `accuracy` is the judge's, of weighted samples; `diversity` is the distance between draws
    of different populations over that of real digits of the class."""
    found = {
        "accuracy": weighted(result, marks(result.samples.flatten(0, 1))),
        "reward accuracy": weighted(result, rewarded),
        "diversity": measured(hamming(result.sample()[:, 0]) / real),
        "ess": ess_share(result),
    }
    if result.reward is not None:
        found["reward"] = weighted(result, result.reward)
    return found


def picture(ids: Tensor, side: int, file: str | Path, columns: int = 16) -> None:
    """Images (P, L) as a sheet, black on white."""
    images = 1.0 - ids.view(-1, side, side).float()
    write_png(file, tiled(images, min(columns, len(images)), max(2, 56 // side)))


def augment(side: int, shift: int, flips: float) -> Callable[[Tensor, Generator], Tensor]:
    """Shift each image (P, L) by up to `shift` pixels each way, filled with white, and flip a share `flips`."""
    pixel = torch.arange(side)

    def augmented(ids: Tensor, generator: Generator) -> Tensor:
        rows, device = len(ids), ids.device
        move = torch.randint(-shift, shift + 1, (2, rows, 1), generator=generator, device=device)
        y, x = pixel.to(device) + move[0], pixel.to(device) + move[1]  # (P, side): where each pixel comes from
        inside = ((0 <= y) & (y < side))[:, :, None] & ((0 <= x) & (x < side))[:, None, :]
        source = y.clamp(0, side - 1)[:, :, None] * side + x.clamp(0, side - 1)[:, None, :]
        moved = ids.gather(1, source.flatten(1)) * inside.flatten(1)
        wrong = torch.rand(ids.shape, generator=generator, device=device) < flips
        return torch.where(wrong, 1 - moved, moved)

    return augmented
