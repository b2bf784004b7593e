"""Objectives of a twist, through the command: what is stored is the log of the value function, by enumeration."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from narrow import some
from toys import Toy, seeded

import tokensteer as ts
from tokensteer.app.cli import main
from tokensteer.app.runs import recipes
from tokensteer.files import write_json
from tokensteer.tasks.catalogue import TASKS, Entry
from tokensteer.tasks.common.learned import find, with_twist
from tokensteer.tasks.common.metrics import Measured, weighted
from tokensteer.tasks.common.proposals import ProposalConfig, ProposalTraining
from tokensteer.tasks.common.task import Setup, Task
from tokensteer.tasks.nets import Transformer, TransformerConfig, ValueConfig, load, save
from tokensteer.testing import enumerate_steering
from tokensteer.train import ProposalPlan, StepVariance

B, NAME, GOAL = Toy("B"), "digits", 4
NET = TransformerConfig(B.tokens + 1, B.length, width=32, depth=1)
TOLERANCE = 0.1
"""In nats, of values that differ by four: the mean error over states of the model and of the target, half of each."""


def as_denoiser(net: torch.nn.Module) -> ts.Denoiser:
    return ts.from_logits(net, B.mask_id, ignores_time=True)


def toy(setup: Setup) -> Task:
    """Three sites of three tokens, of which one opens in each step, under the name of a task that takes goals."""
    model = ts.Diffusion(
        as_denoiser(load(setup.weights / f"{NAME}-denoiser.safetensors")),
        ts.Ranked(B.mask_id, count=lambda step, masked: torch.ones_like(masked)),
        ts.uniform_steps(B.length),
        ts.template(B.length, B.mask_id),
    )

    def metrics(result: ts.Result) -> dict[str, Measured]:
        return {"reward": weighted(result, B.reward(result.samples.flatten(0, 1)))}

    learned = partial(find, setup.weights, NAME, GOAL, as_denoiser, setup.device)
    # Exact, so that the twist of the tilt is a function of the state and what it lacks can be enumerated. The ramp is
    # late, so that it lacks much.
    tilt = ts.Tilt(B.reward, B.kl, ramp=lambda t: (1 - t) ** 4, estimator=ts.Exact())
    return Task(NAME, "a toy", model, tilt, metrics, None, learned=learned, goal=GOAL)


def courses(beside: bool) -> Callable[[int | None, Path], ProposalTraining]:
    plan = ProposalPlan(60, paths=512, on_policy=0.5, updates=4, replay=16, rate=1e-2, baseline_rate=1.0, average=0.98)
    config = ProposalConfig(
        plan, StepVariance(), ValueConfig("transformer", asdict(NET), 64, beside), B.kl, B.length, twist=plan
    )

    def course(goal: int | None, weights: Path) -> ProposalTraining:
        return ProposalTraining(toy, goal, weights, config, as_denoiser, {8: 4}, steps=B.length)

    return course


@pytest.fixture
def networks(tmp_path: Path) -> Path:
    """A model of random weights, and a proposal that differs from it."""
    folder = tmp_path / "networks"
    folder.mkdir()
    torch.manual_seed(0)
    net = Transformer(NET)
    for part, std in (("denoiser", 0.2), (f"proposal-{GOAL}", 0.1)):
        with torch.no_grad():
            net.head.weight += std * torch.randn_like(net.head.weight)
        save(net, folder / f"{NAME}-{part}.safetensors")
        write_json(folder / f"{NAME}-{part}.json", {"kl": B.kl, "denoiser rows": 0, "seconds": 0.0})
    return folder


@pytest.mark.parametrize("beside", [pytest.param(False, marks=pytest.mark.slow), True])
def test_contrast_teaches_the_value_function(
    beside: bool, networks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, NAME, Entry(toy, "a toy", train=lambda training: None, proposal=courses(beside)))
    out = tmp_path / "out"
    words = ["train", NAME, "--twist", "--objective", "contrastive", "--goal", str(GOAL), "--weights", str(networks)]
    assert main([*words, "--out", str(out)]) == 0
    card = json.loads((out / f"{NAME}-value-{GOAL}.json").read_text())
    assert card["objective"] == f"Contrastive(twists={beside}, whole=False)"
    assert f"--twist --goal {GOAL} --objective contrastive --out" in card["command"]
    assert "smc-learned N=8" in card["quality"]

    task = toy(Setup(B.length, GOAL, weights=out))
    trained = recipes.learned(task)
    exact = enumerate_steering(ts.Steering(task.model, task.tilt))
    value = some(trained.value)
    assert value.config.beside == beside
    for k, step in enumerate(task.model.steps):
        there = exact.log_law[k] > -math.inf
        wanted = exact.log_value[k] - exact.log_z - (exact.log_twist[k] if beside else 0.0)
        off = (value(exact.states[there], step.t) - wanted[there]).abs()
        often = (exact.log_law[k].exp() + (exact.log_law[k] + exact.log_value[k] - exact.log_z).exp())[there] / 2
        assert float(often.sum()) == pytest.approx(1)
        assert (often * off).sum() < TOLERANCE, (k, off)
    if not beside:
        tilt = with_twist(task.tilt, trained)
        assert enumerate_steering(ts.Steering(task.model, tilt)).log_z == pytest.approx(exact.log_z, abs=1e-6)

    share = {}
    for name in ("smc-amot", "smc-learned"):
        method = replace(recipes.recipe_of(name).make(task, task.tilt, 16), when=ts.triggers.always)
        result = method(16, 2000, generator=seeded())
        share[name] = result.ess[-1] / 16
        ratio = (result.log_z - exact.log_z).exp()
        assert abs(ratio.mean() - 1) < 4 * ratio.std() / len(ratio) ** 0.5
    gain = share["smc-learned"] - share["smc-amot"]
    assert gain.mean() > 0.15  # of .30 without it
    assert gain.mean() > 10 * gain.std() / len(gain) ** 0.5
