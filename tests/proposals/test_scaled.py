"""Learned proposals at a scale: between the model and the network."""

from __future__ import annotations

import pytest
import torch
from checks import answer, trial
from toys import Toy, seeded

import tokensteer as ts
from tokensteer.testing import assert_proposal

A, B = Toy("A"), Toy("B")


def steering(sampler: str, scale: float) -> ts.Steering:
    return ts.Steering(B.model(sampler), B.tilt(sampler), B.amortised(scale=scale))


@pytest.mark.parametrize("scale", [0.3, 0.8, 1.0])
def test_tokens_are_those_of_the_product_of_powers(scale: float) -> None:
    path = steering("mdm", scale)
    step, x = path.steps[-1], path.start(8, None)  # the last step opens every site
    x[:4, 0] = 1
    q = path.propose(x, path.evaluate(x, step.t, None), step)
    mu, nu = (denoiser(x, step.t) for denoiser in (path.model.base.denoiser, B.amortised().denoiser))
    both = ((1.0 - scale) * mu + scale * nu).nan_to_num(nan=-torch.inf).log_softmax(-1)
    masked = x == B.mask_id
    y = q.sample(seeded())
    token = both.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(q.log_prob(y), torch.where(masked, token, 0.0).sum(-1))
    assert torch.equal(y[~masked], x[~masked])


@pytest.mark.fast
@pytest.mark.parametrize("sampler", ["mdm", "remdm", "lowconf"])
def test_it_samples_what_it_evaluates(sampler: str) -> None:
    assert_proposal(steering(sampler, 0.5), rows=8)


@pytest.mark.parametrize("sampler", ["mdm", "remdm"])
def test_weights_are_unbiased(sampler: str) -> None:
    tilt = ts.Tilt(B.reward, 2.0, draws=2)
    path = ts.Steering(B.model(sampler), tilt, B.amortised(scale=0.6))
    found = trial(path, answer(path.model, tilt), 4, 4096, 0)
    assert found.unbiased, found


@pytest.mark.parametrize("scale", [0.0, 1.5])
def test_other_scales_are_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=r"Amortised\.scale"):
        B.amortised(scale=scale)
