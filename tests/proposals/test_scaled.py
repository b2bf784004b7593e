"""Learned proposals at a scale: between the model and the network, or a change that counts more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checks import answer, trial
from torch import Tensor, nn
from toys import Toy, seeded

import tokensteer as ts
from tokensteer.testing import assert_proposal, enumerate_steering

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


def headed(scale: float, change: nn.Module | None = None) -> ts.Steering:
    """A change of hidden states that counts by so much, or another change that counts by itself."""
    torch.manual_seed(5)
    trunk, head, bend = nn.Embedding(B.mask_id + 1, 3), nn.Linear(3, B.tokens + 1), Bend()
    for layer in (trunk, head, bend):
        layer.requires_grad_(False)
    model = replace(B.model("mdm"), denoiser=ts.from_hidden(trunk, head, B.mask_id, ignores_time=True))
    proposal = ts.OtherHead(head, bend if change is None else change, scale)
    return ts.Steering(model, B.tilt("mdm"), proposal)


class Bend(nn.Module):
    """A change of states that is not linear, times a factor."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, h: Tensor) -> Tensor:
        return h + self.factor * torch.sin(2.0 * h.roll(1, -1))


@pytest.mark.parametrize("scale", [0.4, 1.0, 2.5])
def test_a_change_of_states_counts_by_its_scale(scale: float) -> None:
    scaled, own = headed(scale), headed(1.0, Bend(scale))
    for a, b in zip(enumerate_steering(scaled).moves, enumerate_steering(own).moves, strict=True):
        torch.testing.assert_close(a.log_q, b.log_q)
    assert_proposal(scaled, rows=8)


def test_weights_of_a_scaled_change_are_unbiased() -> None:
    path = headed(2.0)
    found = trial(path, answer(path.model, B.tilt("mdm")), 4, 4096, 0)
    assert found.unbiased, found


def test_scales_of_changes_are_checked() -> None:
    head = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"OtherHead\.scale must be positive and finite"):
        ts.OtherHead(head, torch.clone, 0.0)
    with pytest.raises(ValueError, match="there is no change"):
        ts.OtherHead(head, scale=2.0)
