"""Adaptive ramps: they meet their share, cost no unbiasedness anywhere, and frozen they are ramps like any other."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import answer, trial
from narrow import some, untyped
from pinned_sweeps import one_sweep
from toys import Toy

import tokensteer as ts
from tokensteer import rewards
from tokensteer.core.particles.gibbs import Pinned
from tokensteer.core.twists.ramps import conditional_ess
from tokensteer.testing import enumerate_steering

B = Toy("B")
POTENTIALS = {"difference": ts.potentials.difference, "max": ts.potentials.maximum, "total": ts.potentials.total}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def adaptive(sampler: str = "mdm", share: float = 0.8, kl: float = 2.0, **options) -> ts.Tilt:
    """A gentler tilt than the toy's, whose rare sequences three particles meet too seldom to judge by z-scores."""
    return replace(B.tilt(sampler, ramp=ts.Adaptive(share), **options), kl=kl)


def test_bisection_meets_its_share() -> None:
    log_w = torch.randn(50, 32, dtype=torch.float64, generator=seeded())
    r = (torch.randn(50, 32, generator=seeded(1)) * 9).double()
    before = torch.linspace(0, 0.5, 50, dtype=torch.float64)

    def choose(log_w: torch.Tensor, r: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        least = before.repeat_interleave(log_w.shape[1])
        chosen = ts.Adaptive(0.8).choose(log_w, least, lambda ramp: ramp * r.flatten()).view_as(log_w)
        assert (chosen == chosen[:, :1]).all()
        return chosen[:, 0]

    chosen = choose(log_w, r, before)
    assert (chosen >= before).all()
    counted = log_w + before.unsqueeze(-1) * r
    share = conditional_ess(counted, (chosen - before).unsqueeze(-1) * r)
    assert (((share - 0.8).abs() < 1e-6) | ((chosen == 1) & (share >= 0.8))).all()
    assert (chosen < 1).sum() > 30
    # A reward that says nothing may count in full at once; in a population that has died anything will do.
    assert (choose(log_w, torch.zeros_like(log_w), before) == 1).all()
    weights = torch.full((1, 4), -math.inf, dtype=torch.float64)
    assert choose(weights, torch.ones(1, 4, dtype=torch.float64), before[:1]).isfinite().all()


@pytest.mark.parametrize("proposal", [ts.FromModel(), ts.Gradient(), B.amortised()])
@pytest.mark.parametrize("sampler", ["mdm", "remdm", "lowconf"])
def test_adapting_is_consistent(sampler: str, proposal: ts.Proposal) -> None:
    steering = ts.Steering(B.model(sampler), adaptive(sampler, kl=B.kl), proposal)
    result = ts.smc(steering, 2000, 8, generator=seeded())
    exact = enumerate_steering(steering)
    assert (result.log_z - exact.log_z).abs().max() < 0.25
    here = (result.samples.unsqueeze(2) == exact.states[exact.clean]).all(-1)
    law = (result.weights.unsqueeze(-1) * here).sum(1).mean(0)
    assert 0.5 * (law - exact.target).abs().sum() < 0.05
    assert result.ramp is not None
    assert result.ramp.shape == result.ess.shape
    assert (result.ramp[0] == 0).all()
    assert (result.ramp[-1] == 1).all()
    assert (result.ramp.diff(dim=0) >= 0).all()  # the reward is let in, never out
    assert ((result.ramp[1:-1] > 0) & (result.ramp[1:-1] < 1)).any()


def test_each_factor_meets_the_share() -> None:
    """Under a potential with a memory every step multiplies a factor of its own, and that is what is held back."""
    steering = ts.Steering(B.model("mdm"), adaptive(share=0.7, kl=B.kl, potential=ts.potentials.total))
    records = list(ts.sweep(steering, 200, 5, when=ts.triggers.never, generator=seeded()))
    for before, after in itertools.pairwise(records[:-1]):
        factor = (after.evaluation.log_twist - before.evaluation.log_twist).view_as(after.log_w)
        share = conditional_ess(after.log_w - factor, factor)
        chosen = after.evaluation.ramp
        assert chosen is not None
        assert (((share - 0.7).abs() < 1e-6) | (chosen.view_as(after.log_w)[:, 0] == 1)).all()


PATHS = {
    "base": ts.FromModel(),
    "gradient": ts.Gradient(clip=1.0),
    "amortised": B.amortised(),
}


@pytest.mark.parametrize(
    ("potential", "share"), [("difference", 0.5), ("difference", 0.9), ("max", 0.9), ("total", 0.9)]
)
@pytest.mark.parametrize("proposal", PATHS)
def test_adapting_costs_no_unbiasedness(proposal: str, potential: str, share: float) -> None:
    """Even a ramp chosen from three particles: lambda enters the twist alone, and that is divided out again."""
    tilt = adaptive(share=share, potential=POTENTIALS[potential])
    outcome = trial(
        ts.Steering(B.model("mdm"), tilt, PATHS[proposal]), answer(B.model("mdm"), tilt), 3, populations=4000
    )
    assert outcome.unbiased, str(outcome)


@pytest.mark.parametrize(
    "case", ["random", "remdm", "product", "enumerated", "first", "first product", "ess", "nested"]
)
def test_wherever_a_ramp_is(case: str) -> None:
    options: dict[str, Any] = {}
    model, tilt, proposal = B.model("mdm"), adaptive(), ts.FromModel()
    match case:
        case "random":
            tilt = ts.Tilt(B.reward, 2.0, ts.Adaptive(0.8), draws=2)
        case "remdm":
            model, tilt = B.model("remdm"), adaptive("remdm")
        case "product":
            model, proposal = B.product("mdm", 1.5, -0.5), ts.Gradient(ts.Guided(), clip=1.0)
        case "enumerated" | "first":
            proposal = ts.Enumerated()
        case "first product":
            model, proposal = B.product("mdm", 1.5, -0.5), ts.Enumerated()
        case "ess":
            options = {"resample": ts.resampling.systematic, "when": ts.triggers.ess_below(0.7)}
        case _:
            options = {"resample": ts.resampling.nested(ts.resampling.systematic, 2)}
    path = ts.Steering(model, tilt, proposal)
    path = ts.Auxiliary(path) if "first" in case else path
    particles = 4 if case == "nested" else 3
    outcome = trial(path, answer(model, tilt), particles, populations=4000, **options)
    assert outcome.unbiased, str(outcome)


@pytest.mark.parametrize(
    ("potential", "proposal", "ancestor_sampling"),
    [
        ("difference", "base", False),
        ("difference", "gradient", True),
        ("difference", "enumerated", False),
        ("max", "gradient", False),
        ("total", "base", False),
    ],
)
@pytest.mark.slow
def test_particle_gibbs_keeps_exact_draws(potential: str, proposal: str, ancestor_sampling: bool) -> None:
    q = ts.Enumerated() if proposal == "enumerated" else PATHS[proposal]
    tilt = adaptive(potential=POTENTIALS[potential])
    steering = ts.Steering(B.model("mdm"), tilt, q)
    z, moved = one_sweep(steering, Pinned, ts.triggers.ess_below(0.9), 8000, ancestor_sampling=ancestor_sampling)
    assert z < 4
    assert moved > 0.2


def test_twins_of_different_populations_aim_with_their_own_ramps() -> None:
    steering = ts.Steering(B.model("mdm"), adaptive(), ts.Enumerated())
    x = B.states[[-1, -1]]
    evaluation = replace(steering.evaluate(x, 1.0, None), ramp=torch.tensor([0.0, 1.0], dtype=torch.float64))
    step = steering.steps[0]
    log_mass = some(steering.propose(x, evaluation, step).log_mass)
    p = steering.model.transition(x, untyped(evaluation.prediction), step, None)
    assert abs(float(log_mass[0] - p.total()[0])) < 1e-12
    assert abs(float(log_mass[1] - p.total()[1])) > 0.1


def test_a_constrained_ramp_is_frozen() -> None:
    automaton = rewards.contains([1], B.tokens + 1)
    ramp = ts.adapted_ramp(rewards.constrain(B.model("mdm"), automaton, adaptive()), 50, 4, generator=seeded())
    steering = rewards.constrain(B.model("mdm"), automaton, adaptive())
    steering = replace(steering, twist=replace(some(steering.twist), ramp=ramp))
    outcome = trial(steering, answer(steering.model, steering.twist), 3, populations=2048)
    assert outcome.unbiased, str(outcome)


@pytest.mark.parametrize("sampler", ["mdm", "remdm"])
def test_frozen_it_is_unbiased(sampler: str) -> None:
    steering = ts.Steering(B.model(sampler), ts.Tilt(B.reward, B.kl, draws=4))
    ramp = ts.adapted_ramp(steering, 200, 5, share=0.7, generator=seeded(1))
    assert ramp(0.0) == 1.0
    assert ramp(1.0) == 0.0
    values = [ramp(i / 20) for i in range(21)]
    assert values == sorted(values, reverse=True)
    assert steering.twist is not None
    frozen = replace(steering, twist=replace(steering.twist, ramp=ramp))
    outcome = trial(frozen, answer(frozen.model, frozen.twist), populations=2048)
    assert outcome.unbiased, str(outcome)


def test_what_was_chosen_is_kept(tmp_path: Path) -> None:
    result = ts.smc(ts.Steering(B.model("mdm"), adaptive()), 8, 4, generator=seeded())
    result.save(tmp_path / "result.safetensors")
    again = ts.Result.load(tmp_path / "result.safetensors")
    assert result.ramp is not None
    assert again.ramp is not None
    assert torch.equal(again.ramp, result.ramp)
    assert ts.smc(ts.Steering(B.model("mdm"), B.tilt("mdm")), 8, 4, generator=seeded()).ramp is None


def test_tables_of_single_precision_stay_single_and_twists_are_double() -> None:
    toy = Toy("B", torch.float32)
    steering = ts.Steering(toy.model("mdm"), ts.Tilt(toy.reward, toy.kl, ts.Adaptive(), draws=2), ts.Gradient(clip=1.0))
    for record in ts.sweep(steering, 8, 4, generator=seeded()):
        assert record.evaluation.log_twist.dtype == torch.float64
        if record.step is None or record.step.s > 0:
            assert untyped(record.evaluation.prediction).laws().dtype == torch.float32
            assert untyped(record.evaluation.gradient).laws().dtype == torch.float32


def test_refused() -> None:
    with pytest.raises(ValueError, match="share must lie"):
        ts.Adaptive(1.5)
    with pytest.raises(ValueError, match="no reward to let in"):
        ts.adapted_ramp(ts.Steering(B.model("mdm")), 4)
