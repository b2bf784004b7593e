"""Populations as one: draws pick a population by its Z."""

from __future__ import annotations

import math

import pytest
import torch
from toys import Toy

import tokensteer as ts
from tokensteer.testing import enumerate_steering

TOY = Toy("C")


def result(particles: int = 4, populations: int = 500, **options) -> ts.Result:
    steering = ts.Steering(TOY.model("mdm"), ts.Tilt(TOY.reward, TOY.kl, **options))
    return ts.smc(steering, particles, populations, generator=torch.Generator().manual_seed(0))


def test_pooled_populations_have_the_mean_of_their_z():
    found = result()
    one = found.pooled()
    assert one.log_w.shape == (1, 2000)
    assert float(one.log_z) == pytest.approx(found.pooled_log_z[0])
    z = (found.log_z - found.log_z.max()).exp()
    assert torch.allclose(one.weights.view(500, 4).sum(-1), z / z.sum())
    assert float(one.ess[-1]) == pytest.approx(float(1 / one.weights.square().sum()))


def test_draws_of_pooled_populations_are_nearer_to_the_target():
    """Four particles are few: each population is biased, and the pool of 500 is not."""
    steering = ts.Steering(TOY.model("mdm"), ts.Tilt(TOY.reward, TOY.kl))
    exact = enumerate_steering(steering)
    found = result()

    states = exact.states[exact.clean]

    def law(samples: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        same = (samples.reshape(-1, 1, TOY.length) == states).all(-1)
        return (same * weights.reshape(-1, 1)).sum(0)

    target = exact.target
    each = law(found.samples, found.weights / len(found.weights))
    pool = law(found.pooled().samples, found.pooled().weights)
    assert float((pool - target).abs().sum()) < 0.6 * float((each - target).abs().sum())


def test_ancestors_stay_within_their_population():
    found = result(particles=8, populations=3)
    one = found.pooled()
    assert torch.equal(one.ancestors // 8, torch.arange(3).repeat_interleave(8).expand_as(one.ancestors))
    assert torch.equal(one.ancestors.view_as(found.ancestors) % 8, found.ancestors)
    assert one.lineages().shape == one.ancestors.shape


def test_templates_stay_apart():
    template = torch.full((2, TOY.length), TOY.mask_id)
    template[1, 0] = 1
    model = ts.Diffusion(TOY.model("mdm").denoiser, ts.Ancestral(TOY.mask_id), ts.uniform_steps(3), template)
    found = ts.smc(ts.Steering(model, ts.Tilt(TOY.reward, TOY.kl)), 4, 6, generator=torch.Generator().manual_seed(0))
    one = found.pooled()
    assert one.samples.shape == (2, 12, TOY.length)
    assert (one.samples[1, :, 0] == 1).all()
    assert torch.equal(one.ancestors[:, 1] // 4, torch.arange(3).repeat_interleave(4).expand_as(one.ancestors[:, 1]))


def test_the_scatter_does_not_shrink_with_more_populations():
    few, many = result(populations=100), result(populations=1000)
    assert few.scatter == pytest.approx(many.scatter, rel=0.3)
    assert many.pooled_log_z[1] < 0.5 * few.pooled_log_z[1]
    assert f"one population ± {many.scatter:.2f}" in str(many)
    assert math.isnan(result(populations=1).scatter)


def test_a_pooled_result_is_saved_and_reopened(tmp_path):
    one = result(populations=3).pooled()
    one.save(tmp_path / "x.safetensors")
    again = ts.Result.load(tmp_path / "x.safetensors")
    assert again.samples.equal(one.samples)
    assert again.log_w.equal(one.log_w)
