"""The mixture of Gaussians with a denoiser that was learned from draws.

    tokensteer train mog --out FOLDER

trains it. Its samplers are held to the law of the *model*, by enumeration; how far that is from the data is another
question, which the card of the weights answers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

from tokensteer.core.kernels.schedule import uniform_steps
from tokensteer.core.models.denoiser import Denoiser, Time, from_logits
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.template import template
from tokensteer.core.particles.result import Result
from tokensteer.core.steering.steering import Steering
from tokensteer.core.twists.ramps import constant as constant_ramp
from tokensteer.files import write_json
from tokensteer.tasks.common import learned
from tokensteer.tasks.common.metrics import Measured, in_parts, measured, nll_bound
from tokensteer.tasks.common.png import write_png
from tokensteer.tasks.common.proposals import ProposalConfig, teach
from tokensteer.tasks.common.task import SHIPPED, Setup, Task
from tokensteer.tasks.common.training import Training, say
from tokensteer.tasks.mog import exact as mog
from tokensteer.tasks.nets import Transformer, TransformerConfig, ValueConfig, load, save
from tokensteer.testing.exact import all_sequences
from tokensteer.train import Balance, Plan, ProposalPlan, fit, masked_loss, shown

CONFIG = TransformerConfig(mog.STATES + 1, 2, width=64, depth=2, heads=2)
PLAN = Plan(3000, batch_size=512, rate=3e-3, average=0.998, report_every=50)
COURSE = ProposalConfig(
    ProposalPlan(1000, paths=256, on_policy=0.5, replay=4, updates=2, rate=1e-3, baseline_rate=3.0, average=0.99),
    Balance(0.9, ends=0.5),
    ValueConfig("transformer", asdict(CONFIG)),
    num_steps=25,
)
DRAWS = 100_000
FILE = "mog-denoiser.safetensors"
SAMPLES = 2000
"""In a set whose distance to the target is measured."""


@dataclass(frozen=True)
class LookedUp:
    """A denoiser whose answers to ids stand in a table."""

    network: Denoiser
    table: Tensor
    ignores_time: bool = True

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        return self.network(x, t) if x.is_floating_point() else self.table[x[:, 0] * (mog.STATES + 1) + x[:, 1]]


def computed(net: nn.Module) -> Denoiser:
    """The network in double precision."""

    def logits(x: Tensor) -> Tensor:
        return net(x).double()

    return from_logits(logits, mog.MASK, ignores_time=True)


def looked_up(net: nn.Module) -> Denoiser:
    """The same. There are 65² states, so for ids all its answers are computed once."""
    network = computed(net)
    return LookedUp(network, in_parts(lambda x: network(x, 0.5), all_sequences(mog.STATES + 1, 2)))


def model(setup: Setup) -> Diffusion:
    return Diffusion(
        looked_up(load(setup.weights / FILE)),
        setup.kernel(mog.MASK),
        uniform_steps(setup.num_steps),
        template(2, mog.MASK),
    )


def exact_pmf(setup: Setup) -> Tensor:
    """What a run with this setup is steered to, (64, 64), by enumeration."""
    return mog.target(Steering(model(setup), mog.tilt(1.0 if setup.kl is None else setup.kl))).pmf


def task(setup: Setup | None = None) -> Task:
    """Towards y near 0. The value on the way is known in closed form, and with it the reward counts from the start."""
    setup = Setup() if setup is None else setup
    if setup.device != "cpu":
        raise ValueError(f"mog runs on the CPU, it is too small for anything else: leave out the device {setup.device}")
    prior, kl = model(setup), 1.0 if setup.kl is None else setup.kl
    tilt = mog.tilt(kl, ramp=constant_ramp, estimator=mog.soft_value(prior, kl))
    target = mog.target(Steering(prior, tilt))

    def metrics(result: Result) -> Mapping[str, Measured]:
        weights = result.weights.double()
        parts = (part.tensor_split(sets(*weights.shape)) for part in (result.samples, weights))
        laws = [mog.histogram(x, w) for x, w in zip(*parts, strict=True)]
        return {
            "emd": measured(torch.tensor([mog.emd(law, target.pmf) for law in laws])),
            "reward": measured((weights * mog.reward(result.samples.flatten(0, 1)).view_as(weights)).sum(-1)),
            "exact log_z": Measured(target.log_z, 0.0),
            "ess": measured(result.ess[-1] / weights.shape[1]),
        }

    about = "two tokens of 64 states, a mixture of nine Gaussians, towards y near 0"
    return Task(
        "mog",
        about,
        prior,
        tilt,
        metrics,
        picture,
        pictured=20_000,
        learned=lambda: learned.find(setup.weights, "mog", None, looked_up, "cpu"),
    )


def sets(populations: int, particles: int) -> int:
    """Into how many sets populations are put to measure their distance, since few samples are far from any law: sets of
    2,000 as in the paper, if there are as many; else each population by itself, and all together if they are of one."""
    full = populations * particles // SAMPLES
    return min(populations, full) if full else populations if particles > 1 else 1


def picture(ids: Tensor, file: Path, zoom: int = 6) -> None:
    """Samples (P, 2) as a heat map, y upwards."""
    law = mog.histogram(ids).T.flip(0)
    ink = (law / law.max()).sqrt()  # the square root brings out what is faint
    write_png(file, 1.0 - ink.repeat_interleave(zoom, 0).repeat_interleave(zoom, 1))


def train(training: Training) -> None:
    """Make the weights and their card."""
    plan, out = training.plan(PLAN), training.out
    torch.manual_seed(training.seed)  # pyright: ignore[reportUnknownMemberType]
    net = Transformer(CONFIG).to(training.device)
    ids = mog.Target(mog.pmf(), 0.0).sample(DRAWS, Generator().manual_seed(training.seed))
    generator = Generator(training.device).manual_seed(training.seed)
    training.begin()
    checkpoint = training.checkpoints / FILE
    with shown("mog denoiser") as watch:
        fitted = fit(
            net, masked_loss(mog.MASK), ids, plan=plan, generator=generator, checkpoint=checkpoint, watch=watch
        )
    save(cast("Transformer", fitted.net), out / FILE, torch.bfloat16)
    data = f"{DRAWS} draws from the mixture, tokensteer.tasks.mog.exact.pmf"
    card = training.card("mog", "denoiser of the task mog", data, net, fitted, plan)
    card["quality"] = _quality(training)
    say(json.dumps(card["quality"]))
    write_json((out / FILE).with_suffix(".json"), card)
    training.tidy(FILE)


def train_proposal(
    training: Training,
    goal: int | None = None,
    weights: Path = SHIPPED,
    course: ProposalConfig = COURSE,
    particles: int = SAMPLES,
) -> dict[str, Any]:
    """Teach a copy of the denoiser in `weights` the target, and a twist with it."""
    if goal is not None:
        raise ValueError(f"mog has a single goal: leave out --goal {goal}")

    def make(kl: float | None, num_steps: int) -> Task:
        return task(Setup(num_steps, kl=kl, weights=weights))

    net = load(weights / FILE)
    return teach(make, net, computed, course, training, None, {particles: 4}, weights, looked_up)


def _quality(training: Training) -> dict[str, Any]:
    """The model's own law, by enumeration, beside the data's."""
    prior = model(Setup(weights=training.out))
    law, data = mog.target(Steering(prior)).pmf, mog.pmf()
    generator = Generator().manual_seed(training.seed + 1)
    fresh = mog.Target(data, 0.0).sample(20_000, generator)
    bits = nll_bound(prior.denoiser, fresh, mog.MASK, draws=2, generator=generator)
    try:
        distance = mog.emd(law, data)
    except ImportError:  # POT is optional, and no reason to lose what was trained
        distance = None
    return {
        "bits per site": bits.numbers(),
        "entropy of the data, bits per site": float(-(data * data.log()).sum()) / (2 * math.log(2)),
        "divergence of the model from the data, nats": float((data * (data / law).log()).sum()),
        "distance of the model from the data, cells": distance,
    }
