"""The mixture of Gaussians with a denoiser that was learned from draws.

    tokensteer train mog --out FOLDER

trains it. Samples are compared with the distribution of the *model*, by enumeration; the card of the weights has its
distance from the data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from tokensteer.core.models.denoiser import Denoiser, Time, from_logits
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.template import template
from tokensteer.core.particles.result import Result
from tokensteer.core.steering.steering import Steering
from tokensteer.core.twists.ramps import constant as constant_ramp
from tokensteer.tasks.common import grid, learned
from tokensteer.tasks.common.metrics import Measured, ess_share, in_parts, measured, nll_bound, weighted
from tokensteer.tasks.common.proposals import ProposalConfig, ProposalTraining
from tokensteer.tasks.common.task import SHIPPED, Setup, Task
from tokensteer.tasks.common.training import Network, Training, train_networks
from tokensteer.tasks.mog import exact as mog
from tokensteer.tasks.nets import TransformerConfig, ValueConfig
from tokensteer.testing.exact import all_sequences
from tokensteer.train import Balance, Plan, ProposalPlan, masked_loss

CONFIG = TransformerConfig(grid.STATES + 1, 2, width=64, depth=2, heads=2)
PLAN = Plan(3000, batch_size=512, rate=3e-3, average=0.998, report_every=50)
PROPOSAL = ProposalConfig(
    ProposalPlan(1000, paths=256, on_policy=0.5, replay=4, updates=2, rate=1e-3, baseline_rate=3.0, average=0.99),
    Balance(0.9, ends=0.5),
    ValueConfig("transformer", asdict(CONFIG)),
    num_steps=25,
)
DRAWS = 100_000


@dataclass(frozen=True)
class TabulatedDenoiser:
    """A denoiser whose predictions for ids are in a table."""

    network: Denoiser
    table: Tensor
    ignores_time: bool = True

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        return self.network(x, t) if x.is_floating_point() else self.table[x[:, 0] * (grid.STATES + 1) + x[:, 1]]


def as_denoiser(net: nn.Module) -> Denoiser:
    """The network, in double precision."""

    def logits(x: Tensor) -> Tensor:
        return net(x).double()

    return from_logits(logits, grid.MASK, ignores_time=True)


def tabulated(net: nn.Module) -> Denoiser:
    """The same; the predictions for all 65² states are computed once."""
    network = as_denoiser(net)
    return TabulatedDenoiser(network, in_parts(lambda x: network(x, 0.5), all_sequences(grid.STATES + 1, 2)))


def model(setup: Setup) -> Diffusion:
    return setup.diffusion(tabulated(setup.load("mog", "denoiser")), grid.MASK, template(2, grid.MASK))


def exact_pmf(setup: Setup) -> Tensor:
    """The target of a run with this setup, (64, 64), by enumeration."""
    return grid.target(Steering(model(setup), mog.tilt(1.0 if setup.kl is None else setup.kl))).pmf


def task(setup: Setup) -> Task:
    """Towards y near 0. The soft value has a closed form, so the ramp is constant."""
    setup.refuse_reward("mog")
    if setup.device != "cpu":
        raise ValueError(f"mog runs on the CPU only, got the device {setup.device}: leave it out")
    prior, kl = model(setup), 1.0 if setup.kl is None else setup.kl
    tilt = mog.tilt(kl, ramp=constant_ramp, estimator=mog.soft_value(prior, kl))
    target = grid.target(Steering(prior, tilt))

    @cache
    def floor(count: int) -> Measured:
        """The EMD of `count` exact draws."""
        return measured(grid.floor(target, count, Generator().manual_seed(0)))

    def metrics(result: Result) -> Mapping[str, Measured]:
        distances = [grid.emd(pmf, target.pmf) for pmf in grid.in_sets(result)]
        return {
            "emd": measured(torch.tensor(distances)),
            "emd floor": floor(result.log_w.numel() // len(distances)),
            "reward": weighted(result, mog.reward(result.samples.flatten(0, 1))),
            "exact log_z": Measured(target.log_z, 0.0),
            "ess": ess_share(result),
        }

    return Task(
        "mog",
        "two tokens of 64 states, a mixture of nine Gaussians, towards y near 0",
        prior,
        tilt,
        metrics,
        grid.picture,
        pictured=20_000,
        learned=lambda: learned.find(setup.weights, "mog", None, tabulated, "cpu"),
    )


def train(training: Training) -> None:
    """Train, store and measure the denoiser."""
    ids = grid.Target(mog.pmf(), 0.0).sample(DRAWS, Generator().manual_seed(training.seed))
    networks = {"denoiser": Network(CONFIG, masked_loss(grid.MASK), training.plan(PLAN), ids)}
    source = f"{DRAWS} draws from the mixture, tokensteer.tasks.mog.exact.pmf"
    train_networks(training, "mog", source, networks, lambda: {"denoiser": _quality(training)})


def proposal(
    goal: int | None = None, weights: Path = SHIPPED, config: ProposalConfig = PROPOSAL, particles: int = grid.SAMPLES
) -> ProposalTraining:
    """Training of a proposal, and with it a twist."""
    if goal is not None:
        raise ValueError(f"mog has a single goal: leave out --goal {goal}")
    return ProposalTraining(task, None, weights, config, as_denoiser, {particles: 4}, as_used=tabulated)


def _quality(training: Training) -> dict[str, Any]:
    """The distribution of the model, by enumeration, compared with the data."""
    prior = model(Setup(weights=training.out))
    pmf, data = grid.target(Steering(prior)).pmf, mog.pmf()
    generator = Generator().manual_seed(training.seed + 1)
    fresh = grid.Target(data, 0.0).sample(20_000, generator)
    bits = nll_bound(prior.denoiser, fresh, grid.MASK, draws=2, generator=generator)
    try:
        distance = grid.emd(pmf, data)
    except ImportError:  # POT is optional
        distance = None
    return {
        "bits per site": bits.numbers(),
        "entropy of the data, bits per site": float(-(data * data.log()).sum()) / (2 * math.log(2)),
        "divergence of the model from the data, nats": float((data * (data / pmf).log()).sum()),
        "distance of the model from the data, cells": distance,
    }
