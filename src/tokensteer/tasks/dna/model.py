"""The networks, model and target of the task `dna`.

Ids 0 to 3 are A, C, G, T, 4 is the mask. The reward is log p(cell | x) of a convolutional classifier of four cell
types; the judge is a transformer over words, trained on other sites from another seed. The reward is accessibility as
the classifier predicts it, not measured activity.

The default reward is log p and not the logit log p - log(1 - p), because log p is bounded by 0. A logit over a small kl
keeps growing where the classifier is already certain, and there its errors are its own. The logit, called activity, is
the second reward: it asks for what the paper reports.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tokensteer.core.kernels.kernel import NO_MASK
from tokensteer.core.kernels.noise import uniform_noise
from tokensteer.core.kernels.schedule import uniform_steps
from tokensteer.core.models.denoiser import Denoiser, from_logits
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.template import template
from tokensteer.core.twists.estimators import Sampled
from tokensteer.core.twists.ramps import linear as linear_ramp
from tokensteer.core.twists.tilt import Tilt
from tokensteer.tasks.common.metrics import Classifier
from tokensteer.tasks.common.task import Setup
from tokensteer.tasks.dna.data import CELLS, LENGTH, LETTERS, MASK, VOCAB_SIZE
from tokensteer.tasks.nets import DilatedConfig, MotifConfig, WordsConfig

NAME = "dna"
LOG_P, LOGIT = "log-p", "logit"
KLS = {LOG_P: 0.1, LOGIT: 0.5}
"""The rewards, each with its default kl; the first is the default."""
KL = KLS[LOG_P]
RAMP = linear_ramp
DRAWS = 4
"""Ramp, draws and the kl of log-p are the paper's."""

DILATIONS = (1, 2, 4, 8, 16, 32, 1, 2, 4, 8)
DENOISER = DilatedConfig(VOCAB_SIZE, LENGTH, 96, 5, DILATIONS, dropout=0.1, num_classes=len(CELLS))
UNIFORM = DilatedConfig(len(LETTERS), LENGTH, 96, 5, DILATIONS, dropout=0.1, timed=True)
REWARD = MotifConfig(VOCAB_SIZE, LENGTH, len(CELLS), channels=(160, 128, 96), dropout=0.3)
JUDGE = WordsConfig(VOCAB_SIZE, LENGTH, len(CELLS), dropout=0.2)


def as_denoiser(net: nn.Module) -> Denoiser:
    """The network without a label."""
    return from_logits(net, MASK, ignores_time=True)


def of_cell(net: nn.Module, cell: int) -> Denoiser:
    """The network given the cell type."""

    def labelled(x: Tensor) -> Tensor:
        return net(x, None, torch.tensor(cell, device=x.device))

    return from_logits(labelled, MASK, ignores_time=True)


def model(setup: Setup) -> Diffusion:
    """The trained denoiser as an ancestral sampler."""
    return setup.diffusion(as_denoiser(setup.load(NAME, "denoiser")), MASK, template(LENGTH, MASK))


def uniform_model(setup: Setup) -> Diffusion:
    """The model under uniform noise: letters become random letters, and the network reads the time."""
    net = setup.load(NAME, "uniform")
    canvas = torch.full((LENGTH,), NO_MASK, device=setup.device)
    kernel = uniform_noise(len(LETTERS))
    return Diffusion(from_logits(net, NO_MASK), kernel, uniform_steps(setup.num_steps()), canvas)


def cell_of(goal: int | None) -> int:
    """The cell type of a goal, HepG2 unless given."""
    cell = 0 if goal is None else goal
    if not 0 <= cell < len(CELLS):
        known = ", ".join(f"{i} ({name})" for i, name in enumerate(CELLS))
        raise ValueError(f"--goal must be a cell type of dna, {known}: got {goal}")
    return cell


def tilt(classifier: Classifier, cell: int, reward: str = LOG_P, kl: float | None = None) -> Tilt:
    """The target p(x) · exp(r(x)/kl), where r is log p(cell | x) or its logit. log p over kl runs from -50 to 0: with
    fresh noise its estimates would differ more by the noise than by the particle, so all particles share the noise."""

    def log_p(x: Tensor) -> Tensor:
        return classifier(x)[:, cell]

    def activity(x: Tensor) -> Tensor:
        return logit(classifier(x), cell)

    chosen = {LOG_P: log_p, LOGIT: activity}[reward]
    return Tilt(chosen, KLS[reward] if kl is None else kl, RAMP, DRAWS, estimator=Sampled(seed=0), differentiable=True)


def logit(log_p: Tensor, cell: int) -> Tensor:
    """log p - log(1 - p) of a cell type, (P,), from log-probabilities (P, K)."""
    others = torch.arange(log_p.shape[-1], device=log_p.device) != cell
    return log_p[:, cell] - log_p[:, others].logsumexp(-1)
