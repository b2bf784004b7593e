"""Resampling before the move: the same target, with weights known one step earlier."""

from __future__ import annotations

import math

import pytest
import torch
from toys import Toy

import tokensteer as ts
from tokensteer.testing import enumerate_steering


def steering(sampler: str, target: str) -> ts.Steering:
    toy = Toy("B")
    model = toy.model(sampler) if target == "tilt" else toy.product(sampler, 1.5, -0.5, correct_remasking=False)
    tilt = toy.tilt(sampler) if "tilt" in target else None
    return ts.Steering(model, tilt, ts.Optimal() if target == "product" else ts.Enumerated())


@pytest.mark.parametrize("sampler", ["mdm", "remdm", "lowconf"])
@pytest.mark.parametrize("target", ["tilt", "product", "product+tilt"])
def test_unbiased(sampler: str, target: str) -> None:
    path = steering(sampler, target)
    exact = enumerate_steering(path)
    generator = torch.Generator().manual_seed(8)
    result = ts.smc(
        ts.Auxiliary(path), 8, 3000, when=ts.triggers.always, resample=ts.resampling.multinomial, generator=generator
    )
    clean = exact.states[exact.clean]
    here = (result.samples.unsqueeze(2) == clean).all(-1)
    mass = (result.log_w.exp().unsqueeze(-1) * here).mean(1) / math.exp(exact.log_z)
    often = exact.target >= 1e-3
    z = (mass.mean(0) - exact.target) / (mass.std(0) / math.sqrt(len(mass)))
    assert z[often].abs().max() < 4.5
    ratio = mass.sum(-1)
    assert abs((ratio.mean() - 1) / (ratio.std() / math.sqrt(len(ratio)))) < 4


def test_the_weight_is_known_before_the_move() -> None:
    """Given where a particle was, all its moves weigh the same, up to what is known of the place it came to."""
    path = ts.Auxiliary(steering("mdm", "tilt"))
    records = list(ts.sweep(path, 64, when=ts.triggers.never, generator=torch.Generator().manual_seed(0)))
    # The last weight has been counted already: it was the mass of the last proposal.
    assert records[-1].log_increment.abs().max() < 1e-12
    assert records[-2].log_increment.std() > 0.1


def test_it_spares_variance() -> None:
    path = steering("mdm", "tilt")
    generator = torch.Generator().manual_seed(1)
    plain, first = (
        ts.smc(p, 32, 1500, when=ts.triggers.always, generator=generator).log_z.exp()
        for p in (path, ts.Auxiliary(path))
    )
    assert first.std() < plain.std()


def test_other_proposals_are_refused() -> None:
    toy = Toy("B")
    with pytest.raises(ValueError, match="weight depends on x_t alone"):
        ts.smc(ts.Auxiliary(ts.Steering(toy.model("mdm"), toy.tilt("mdm"), ts.Gradient())), 4)
