"""The mixture of Gaussians against its known numbers."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch.nn.functional import one_hot

import tokensteer as ts
from tokensteer.tasks.common import grid
from tokensteer.tasks.mog import exact as mog
from tokensteer.testing import TableDenoiser, all_sequences

ALL = all_sequences(grid.STATES + 1, 2)
CLEAN = all_sequences(grid.STATES, 2)
ARROW = ((0, 6, 0), (3, 0, 3), (2, 2, 2))
"""Modes by x and y with unequal weights: each third of the mass in one, two and three of them."""


def one_hots(x: torch.Tensor) -> torch.Tensor:
    return one_hot(x, grid.STATES + 1).double()


def test_data_constants():
    p, r = mog.pmf().flatten(), mog.reward(CLEAN)
    tilted = p * r.exp()
    assert float(tilted.sum().log()) == pytest.approx(-1.45083, abs=1e-4)
    assert float((p * r).sum()) == pytest.approx(-11.434, abs=1e-3)
    assert float((tilted * r).sum() / tilted.sum()) == pytest.approx(-0.29856, abs=1e-4)


@pytest.mark.parametrize("weights", [None, torch.tensor(ARROW)])
def test_denoiser_is_the_exact_one_for_ids_and_one_hots(weights):
    joint = mog.pmf(weights)
    denoiser, table = mog.denoiser(joint), TableDenoiser(joint)
    x = ALL[torch.randperm(len(ALL), generator=torch.Generator().manual_seed(0))[:300]]
    expected = table(x, 0.5).exp()
    torch.testing.assert_close(denoiser(x, 0.5).exp(), expected)
    soft = one_hots(x).mul(0.9).add(0.1 / 65).requires_grad_()
    torch.testing.assert_close(denoiser(one_hots(x), 0.5).exp(), expected)
    mine, theirs = (torch.autograd.grad(f(soft, 0.5).exp().square().sum(), soft)[0] for f in (denoiser, table))
    torch.testing.assert_close(mine, theirs)


def test_reward_of_ids_and_one_hots():
    torch.testing.assert_close(mog.reward(one_hots(CLEAN)), mog.reward(CLEAN))
    corner = torch.tensor([[0, 63]])
    assert mog.reward(corner).item() == pytest.approx(-36 / 100 - 36)


@pytest.mark.parametrize("kl", [1.0, 3.0])
def test_soft_value_is_what_enumeration_gives(kl):
    model = mog.model(2, mog.pmf(torch.tensor(ARROW)))
    x = torch.cat([ALL[-65:], ALL[grid.STATES :: 65], ALL[:5]])  # all with a mask, and a few without
    exact = mog.tilt(kl, estimator=ts.Exact())
    value = mog.soft_value(model, kl).function
    expected = exact.estimate(ts.NoisyState(x, model.denoiser(x, 0.5), 0.5, grid.MASK), None)
    torch.testing.assert_close(value(x, 0.5), expected)
    torch.testing.assert_close(value(one_hots(x), 0.5), expected)


@pytest.mark.parametrize("weights", [None, torch.tensor(ARROW)])
def test_target_is_the_samplers_own_law(weights):
    """Both sites open in the same of T equal steps with probability 1/T, and are then independent."""
    joint, num_steps = mog.pmf(weights), 4
    target = grid.target(ts.Steering(mog.model(num_steps, joint), mog.tilt()))
    law = (1 - 1 / num_steps) * joint + joint.sum(1, keepdim=True) * joint.sum(0) / num_steps
    tilted = law * mog.reward(CLEAN).exp().view_as(law)
    assert target.log_z == pytest.approx(float(tilted.sum().log()))
    torch.testing.assert_close(target.pmf, tilted / tilted.sum())


def test_emd_of_a_shift_is_the_shift():
    target = mog.pmf()
    assert grid.emd(target, target) == 0.0
    middle = torch.zeros(64, 64, dtype=torch.float64)
    middle[20:30, 20:30] = torch.rand(10, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    middle /= middle.sum()
    assert grid.emd(middle, middle.roll((3, 4), (0, 1))) == pytest.approx(5.0)
    assert grid.emd(middle, middle.roll(-7, 1)) == pytest.approx(7.0)


def test_histogram_counts_weights():
    samples = torch.tensor([[[0, 1], [2, 3]], [[0, 1], [63, 63]]])
    pmf = grid.histogram(samples, torch.tensor([[1.0, 2.0], [4.0, 1.0]]))
    assert pmf[0, 1] == pytest.approx(5 / 8)
    assert pmf[2, 3] == pytest.approx(2 / 8)
    assert pmf[63, 63] == pytest.approx(1 / 8)


def z_score(method: ts.Method, log_z: float, num_particles: int, populations: int) -> float:
    result = method(num_particles, populations, generator=torch.Generator().manual_seed(0))
    z = (result.log_z - log_z).exp()
    return float((z.mean() - 1) / (z.std() / math.sqrt(populations)))


@pytest.mark.parametrize("exact", [True, False])
def test_smc_base_knows_log_z(exact):
    model = mog.model(20)
    tilt = mog.tilt(estimator=mog.soft_value(model) if exact else None)
    method = ts.smc_base(model, tilt)
    assert abs(z_score(method, grid.target(method.steering).log_z, 200, 32)) < 4


def test_guidance_knows_log_z():
    method = ts.smc_cfg(mog.model(10, mog.pmf(torch.tensor(ARROW))), mog.model(10), 2.0)
    assert abs(z_score(method, grid.target(method.steering).log_z, 200, 32)) < 4


def test_first_order_is_exact_here():
    """The sites are independent and the value is linear at each: with a constant ramp all weights are equal."""
    model = mog.model(10)
    tilt = mog.tilt(ramp=ts.ramps.constant, estimator=mog.soft_value(model))
    result = ts.prop_grad(model, tilt, clip=None)(100, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(result.log_w, torch.full_like(result.log_w, grid.target(ts.Steering(model, tilt)).log_z))


def test_missing_pot_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(ImportError, match=r"tokensteer\[eval\]"):
        grid.emd(mog.pmf(), mog.pmf().roll(1, 0))
