"""The networks of the task `dna`, the model made of them, and what is asked of it.

Ids 0 to 3 are A, C, G, T, 4 is the mask. The reward is log p(cell | x) of a convolutional classifier of four cell
types, for one of them; a transformer over words, taught on other sites from another seed, judges. The reward is
accessibility as the classifier predicts it, not measured activity.

Why log p and not the logit log p - log(1 - p): it is bounded by 0. A logit divided by a small kl pays for ever more of
the same, long after the classifier is sure, and that is where a classifier is wrong in its own way.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from tokensteer.core.kernels.kernel import NO_MASK, Kernel
from tokensteer.core.kernels.noise import uniform_noise
from tokensteer.core.kernels.schedule import uniform_steps
from tokensteer.core.models.denoiser import Denoiser, from_logits
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.template import template
from tokensteer.core.twists.estimators import Sampled
from tokensteer.core.twists.ramps import Ramp
from tokensteer.core.twists.ramps import linear as linear_ramp
from tokensteer.core.twists.tilt import Tilt
from tokensteer.tasks.common.metrics import Classifier
from tokensteer.tasks.common.task import Setup
from tokensteer.tasks.dna.data import CELLS, LENGTH, LETTERS, MASK, VOCAB_SIZE
from tokensteer.tasks.nets import DilatedConfig, MotifConfig, WordsConfig
from tokensteer.tasks.nets import load as load_net

NAME = "dna"
KL = 0.1
RAMP = linear_ramp
DRAWS = 4
"""The paper's, as the ramp and kl are."""

DILATIONS = (1, 2, 4, 8, 16, 32, 1, 2, 4, 8)
DENOISER = DilatedConfig(VOCAB_SIZE, LENGTH, 96, 5, DILATIONS, dropout=0.1, num_classes=len(CELLS))
UNIFORM = DilatedConfig(len(LETTERS), LENGTH, 96, 5, DILATIONS, dropout=0.1, timed=True)
REWARD = MotifConfig(VOCAB_SIZE, LENGTH, len(CELLS), channels=(160, 128, 96), dropout=0.3)
JUDGE = WordsConfig(VOCAB_SIZE, LENGTH, len(CELLS), dropout=0.2)


def file_of(role: str, folder: Path) -> Path:
    return folder / f"{NAME}-{role}.safetensors"


def as_denoiser(net: nn.Module) -> Denoiser:
    """The network without a label."""
    return from_logits(net, MASK, ignores_time=True)


def of_cell(net: nn.Module, cell: int) -> Denoiser:
    """The network told the cell type."""

    def told(x: Tensor) -> Tensor:
        return net(x, None, torch.tensor(cell, device=x.device))

    return from_logits(told, MASK, ignores_time=True)


def model(setup: Setup, role: str = "denoiser", kernel: Kernel | None = None) -> Diffusion:
    """A trained denoiser as a sampler, ancestral unless a kernel is given."""
    net = load_net(file_of(role, setup.weights), setup.device)
    canvas = template(LENGTH, MASK).to(setup.device)
    return Diffusion(
        as_denoiser(net), setup.kernel(MASK) if kernel is None else kernel, uniform_steps(setup.num_steps), canvas
    )


def uniform_model(setup: Setup) -> Diffusion:
    """The same data under uniform noise: letters become random letters, and the network is told the time."""
    net = load_net(file_of("uniform", setup.weights), setup.device)
    canvas = torch.full((LENGTH,), NO_MASK, device=setup.device)
    kernel = uniform_noise(len(LETTERS))
    return Diffusion(from_logits(net, NO_MASK), kernel, uniform_steps(setup.num_steps), canvas)


def classifier(role: str, setup: Setup) -> Classifier:
    """Of ids (P, L), log-probabilities of the cell types (P, 4); `role` is reward or judge."""
    return cast("Classifier", load_net(file_of(role, setup.weights), setup.device))


def cell_of(goal: int | None) -> int:
    """The cell type that a goal asks for, HepG2 unless given."""
    cell = 0 if goal is None else goal
    if not 0 <= cell < len(CELLS):
        known = ", ".join(f"{i} ({name})" for i, name in enumerate(CELLS))
        raise ValueError(f"--goal must be a cell type of dna, {known}: got {goal}")
    return cell


def tilt(reward: Classifier, cell: int, ramp: Ramp = RAMP, kl: float = KL, draws: int = DRAWS) -> Tilt:
    """The target p(x) · p(cell | x)^(1/kl). The reward over kl runs from -50 to 0: draws of fresh noise would tell
    their own luck apart rather than the particles, so all share one."""
    return Tilt(lambda x: reward(x)[:, cell], kl, ramp, draws, estimator=Sampled(seed=0), differentiable=True)


def logit(log_p: Tensor, cell: int) -> Tensor:
    """log p - log(1 - p) of a cell type, (P,), from log-probabilities (P, K) of all."""
    others = torch.arange(log_p.shape[-1], device=log_p.device) != cell
    return log_p[:, cell] - log_p[:, others].logsumexp(-1)
