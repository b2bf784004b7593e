"""Adaptive ramps: they meet their share, and frozen they are ramps like any other."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from toys import Toy

import tokensteer as ts
from tokensteer.core.adaptive import conditional_ess, next_lambda
from tokensteer.testing import enumerate_steering


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def z_score(log_z: torch.Tensor, exact: float) -> float:
    ratio = (log_z - exact).exp()
    return float((ratio.mean() - 1) / (ratio.std() / math.sqrt(len(ratio))))


def test_bisection_meets_its_share() -> None:
    log_w, r = (
        torch.randn(50, 32, dtype=torch.float64, generator=seeded()),
        torch.randn(50, 32, generator=seeded(1)) * 9,
    )
    before = torch.linspace(0, 0.5, 50, dtype=torch.float64)
    chosen = next_lambda(log_w, r.double(), before, 0.8)
    assert (chosen >= before).all()
    counted = log_w + before.unsqueeze(-1) * r
    share = conditional_ess(counted, (chosen - before).unsqueeze(-1) * r)
    assert (((share - 0.8).abs() < 1e-6) | ((chosen == 1) & (share >= 0.8))).all()
    assert (chosen < 1).sum() > 30
    # A reward that says nothing may count in full at once; so may it in a population that has died.
    assert (next_lambda(log_w, torch.zeros_like(log_w), before, 0.8) == 1).all()
    weights = torch.full((1, 4), -math.inf, dtype=torch.float64)
    assert next_lambda(weights, torch.ones(1, 4, dtype=torch.float64), before[:1], 0.8).isfinite().all()


@pytest.mark.parametrize("proposal", [ts.FromModel(), ts.Gradient(), Toy("B").amortised()])
@pytest.mark.parametrize("sampler", ["mdm", "remdm", "lowconf"])
def test_adapting_is_consistent(sampler: str, proposal: ts.Proposal) -> None:
    toy = Toy("B")
    steering = ts.Steering(toy.model(sampler), toy.tilt(sampler), proposal)
    path = ts.AdaptiveRamp(steering, 0.8)
    result = ts.smc(path, 2000, 8, generator=seeded())
    exact = enumerate_steering(steering)
    assert (result.log_z - exact.log_z).abs().max() < 0.25
    here = (result.samples.unsqueeze(2) == exact.states[exact.clean]).all(-1)
    law = (result.weights.unsqueeze(-1) * here).sum(1).mean(0)
    assert 0.5 * (law - exact.target).abs().sum() < 0.05
    lambdas = torch.stack([path.lambdas[t] for t in sorted(path.lambdas, reverse=True)])
    assert (lambdas.diff(dim=0) >= 0).all()  # the reward is let in, never out
    assert (lambdas > 0).any()


@pytest.mark.parametrize("sampler", ["mdm", "remdm"])
def test_frozen_it_is_unbiased(sampler: str) -> None:
    toy = Toy("B")
    steering = ts.Steering(toy.model(sampler), ts.Tilt(toy.reward, toy.kl, draws=4))
    ramp = ts.adapted_ramp(steering, 200, 5, share=0.7, generator=seeded(1))
    assert ramp(0.0) == 1.0
    assert ramp(1.0) == 0.0
    values = [ramp(i / 20) for i in range(21)]
    assert values == sorted(values, reverse=True)
    assert steering.twist is not None
    frozen = replace(steering, twist=replace(steering.twist, ramp=ramp))
    result = ts.smc(frozen, 8, 6000, generator=seeded(2))
    assert abs(z_score(result.log_z, enumerate_steering(steering).log_z)) < 4


@pytest.mark.parametrize("proposal", [ts.FromModel(), ts.Gradient(clip=1.0), Toy("B").amortised()])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_adapting_costs_no_unbiasedness(proposal: ts.Proposal, share: float) -> None:
    """Even a ramp chosen from three particles: lambda enters the twist alone, and that is divided out again."""
    toy = Toy("B")
    steering = ts.Steering(toy.model("mdm"), toy.tilt("mdm"), proposal)
    result = ts.smc(ts.AdaptiveRamp(steering, share), 3, 30_000, when=ts.always, generator=seeded(3))
    assert abs(z_score(result.log_z, enumerate_steering(steering).log_z)) < 4


@pytest.mark.parametrize(
    ("tilt", "share", "says"),
    [(None, 0.9, "nothing to let in"), ("max", 0.9, "difference potential"), ("plain", 1.5, "share must lie")],
)
def test_refused(tilt: str | None, share: float, says: str) -> None:
    toy = Toy("A")
    twist = None if tilt is None else ts.Tilt(toy.reward, potential=ts.maximum if tilt == "max" else ts.difference)
    with pytest.raises(ValueError, match=says):
        ts.AdaptiveRamp(ts.Steering(toy.model("mdm"), twist), share)
