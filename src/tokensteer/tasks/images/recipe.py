"""Binary images of digits: what `digits` and `mnist` share.

Ids 0 and 1 are paper and ink, 2 is the mask. The reward is log p(y | x) of a convolutional classifier for one digit y,
so with kl = 1 the target p(x) · p(y | x) is the model's own posterior of that digit. A transformer over patches, which
nothing was steered by, judges the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Generator, Tensor, nn

from tokensteer.core.kernels.kernel import Kernel
from tokensteer.core.kernels.schedule import uniform_steps
from tokensteer.core.models.denoiser import Denoiser, from_logits
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.template import template
from tokensteer.core.particles.result import Result
from tokensteer.core.twists.ramps import Ramp
from tokensteer.core.twists.ramps import exponential as exponential_ramp
from tokensteer.core.twists.tilt import Tilt
from tokensteer.tasks.common import arrays as arrays_in
from tokensteer.tasks.common import learned
from tokensteer.tasks.common.metrics import Classifier, Measured, hamming, in_parts, measured
from tokensteer.tasks.common.png import tiled, write_png
from tokensteer.tasks.common.proposals import ProposalConfig
from tokensteer.tasks.common.task import Setup, Task, read_card
from tokensteer.tasks.nets import ConvConfig, PatchConfig, UNetConfig
from tokensteer.tasks.nets import load as load_net
from tokensteer.train import Plan

MASK = 2
VOCAB_SIZE = 3
CLASSES = 10
ROLES = ("denoiser", "reward", "judge")
RAMP = exponential_ramp(100)
"""The paper's, min(1.05^i - 1, 1) at the i-th of a hundred steps: full after a seventh of the time, however many."""


@dataclass(frozen=True)
class Images:
    """ids (D, L) of type uint8, labels (D,)."""

    ids: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Data:
    train: Images
    test: Images


@dataclass(frozen=True)
class Recipe:
    """All that tells one of these tasks from another: its images, its networks, how they are trained.

    Classifiers see images shifted by up to `shift` pixels with a share `flips` of their pixels wrong: what steering
    finds must please them as a digit, not as a pattern of pixels that happens to.
    """

    name: str
    side: int
    data: Callable[[], Data]
    denoiser: UNetConfig
    reward: ConvConfig
    judge: PatchConfig
    plans: tuple[Plan, Plan, Plan]
    course: ProposalConfig
    shift: int
    flips: float
    source: str

    @property
    def length(self) -> int:
        return self.side * self.side


def unpack(file: Path, length: int) -> Data:
    """Images from packed bits: train (D, L/8), train_y, test, test_y."""
    arrays = arrays_in.read(file, ("train", "train_y", "test", "test_y"), "make it again")

    def images(part: str) -> Images:
        bits = np.unpackbits(arrays[part], axis=1)[:, :length]
        return Images(torch.from_numpy(bits), torch.from_numpy(arrays[f"{part}_y"].astype(np.int64)))  # pyright: ignore[reportUnknownMemberType]

    return Data(images("train"), images("test"))


def file_of(recipe: Recipe, role: str, folder: Path) -> Path:
    return folder / f"{recipe.name}-{role}.safetensors"


# ---- the model and what is asked of it


def model(recipe: Recipe, setup: Setup, kernel: Kernel | None = None) -> Diffusion:
    """The trained denoiser as a sampler, ancestral unless a kernel is given."""
    net = load_net(file_of(recipe, "denoiser", setup.weights), setup.device)
    canvas = template(recipe.length, MASK).to(setup.device)
    return Diffusion(
        as_denoiser(net), setup.kernel(MASK) if kernel is None else kernel, uniform_steps(setup.num_steps), canvas
    )


def as_denoiser(net: nn.Module) -> Denoiser:
    return from_logits(net, MASK, ignores_time=True)


def classifier(recipe: Recipe, role: str, setup: Setup) -> Classifier:
    """Of images (P, L), log-probabilities of the ten digits; `role` is reward or judge."""
    return cast("Classifier", load_net(file_of(recipe, role, setup.weights), setup.device))


def tilt(reward: Classifier, digit: int, ramp: Ramp = RAMP, kl: float = 1.0, draws: int = 10) -> Tilt:
    """The target p(x) · p(digit | x)^(1/kl)."""
    if not 0 <= digit < CLASSES:
        raise ValueError(f"the goal must be a digit from 0 to 9, got {digit}")
    return Tilt(lambda x: reward(x)[:, digit], kl, ramp, draws, differentiable=True)


def task(recipe: Recipe, setup: Setup) -> Task:
    """A digit, 4 unless `setup.goal` says another."""
    digit = 4 if setup.goal is None else setup.goal
    reward, judge = (classifier(recipe, role, setup) for role in ("reward", "judge"))
    file = file_of(recipe, "denoiser", setup.weights).with_suffix(".json")
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
    )


def assess(result: Result, marks: Callable[[Tensor], Tensor], rewarded: Tensor, real: float) -> dict[str, Measured]:
    """Means over populations. `accuracy` is the judge's, of the weighted samples; `diversity` compares draws of
    different populations with each other, real digits of that class being 1."""
    weights = result.weights.double()
    judged = marks(result.samples.flatten(0, 1)).view_as(weights)
    draws = result.sample()[:, 0]
    found = {
        "accuracy": measured((weights * judged).sum(-1)),
        "reward accuracy": measured((weights * rewarded.view_as(weights)).sum(-1)),
        "diversity": measured(hamming(draws) / real),
        "ess": measured(result.ess[-1] / weights.shape[1]),
    }
    if result.reward is not None:
        found["reward"] = measured((weights * result.reward).sum(-1))
    return found


def picture(ids: Tensor, side: int, file: Path, columns: int = 16) -> None:
    """Images (P, L) as a sheet of black ink on white paper."""
    images = 1.0 - ids.view(-1, side, side).float()
    write_png(file, tiled(images, min(columns, len(images)), max(2, 56 // side)))


# ---- images made harder


def augment(side: int, shift: int, flips: float) -> Callable[[Tensor, Generator], Tensor]:
    """Move each image (P, L) by up to `shift` pixels each way, paper coming in, and turn a share `flips` of pixels."""
    place = torch.arange(side)

    def harder(ids: Tensor, generator: Generator) -> Tensor:
        rows, device = len(ids), ids.device
        move = torch.randint(-shift, shift + 1, (2, rows, 1), generator=generator, device=device)
        y, x = place.to(device) + move[0], place.to(device) + move[1]  # (P, side): where each pixel comes from
        inside = ((0 <= y) & (y < side))[:, :, None] & ((0 <= x) & (x < side))[:, None, :]
        source = y.clamp(0, side - 1)[:, :, None] * side + x.clamp(0, side - 1)[:, None, :]
        moved = ids.gather(1, source.flatten(1)) * inside.flatten(1)
        wrong = torch.rand(ids.shape, generator=generator, device=device) < flips
        return torch.where(wrong, 1 - moved, moved)

    return harder
