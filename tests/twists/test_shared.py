"""Draws whose noise all particles share at all times: a twist that is a function of x_t, and exact as any other."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from checks import answer, trial
from toys import Toy

import tokensteer as ts
from tokensteer.core.numerics.draws import shared_uniforms
from tokensteer.core.twists.estimators import NoisyState, draw_clean
from tokensteer.testing import enumerate_steering

B = Toy("B")
CPU = torch.device("cpu")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("proposal", [ts.FromModel(), ts.Enumerated()], ids=["base", "enumerated"])
@pytest.mark.parametrize("sampler", ["mdm", "remdm", "lowconf"])
def test_unbiased(sampler: str, proposal: ts.Proposal) -> None:
    """Also with a proposal that must know the twist of every state it might go to: nothing about it is random."""
    tilt = B.tilt(sampler, draws=3, estimator=ts.Sampled(seed=1))
    path = ts.Steering(B.model(sampler), tilt, proposal)
    outcome = trial(path, answer(path.model, path.twist))
    assert outcome.unbiased, str(outcome)


def test_it_is_a_function_of_the_state() -> None:
    """The twists of a run are those of the enumeration, whoever stands beside a particle and whenever."""
    tilt = B.tilt("mdm", draws=3, estimator=ts.Sampled(seed=1))
    path = ts.Steering(B.model("mdm"), tilt)
    exact = enumerate_steering(path)
    assert exact.log_z == pytest.approx(enumerate_steering(ts.Steering(path.model, B.tilt("mdm"))).log_z, abs=1e-9)
    seen = 0
    for k, record in enumerate(ts.sweep(path, 16, 4, generator=seeded(), when=ts.triggers.observe)):
        x = record.x.flatten(0, 1)
        which = (x.unsqueeze(1) == exact.states).all(-1).long().argmax(-1)
        assert torch.allclose(record.evaluation.log_twist, exact.log_twist[k][which], atol=1e-9)
        seen += len(which.unique())
    assert seen > 30
    other = enumerate_steering(ts.Steering(path.model, replace(tilt, estimator=ts.Sampled(seed=2))))
    assert not torch.allclose(other.log_twist[1], exact.log_twist[1])


def test_draws_cover_each_law_evenly_and_have_it() -> None:
    u = shared_uniforms(0, 7, 50, CPU)
    assert torch.equal((7 * u).ceil().sort(0).values, torch.arange(1.0, 8.0).double().unsqueeze(-1).expand(7, 50))
    law, x = torch.tensor([0.5, 0.3, 0.2]), torch.full((1, 1), 3)
    look = NoisyState(x, torch.cat([law.log(), torch.tensor([-torch.inf])]).view(1, 1, 4), 0.5, 3)
    drawn = torch.stack([draw_clean(look, 10, None, shared_uniforms(s, 10, 1, CPU).T)[:, 0, 0] for s in range(2000)])
    counts = torch.stack([(drawn == v).sum(-1) for v in range(3)], -1).float()
    assert ((counts - 10 * law).abs() < 1).all()  # one of ten would be off by 1.6 or so
    first = torch.stack([(drawn[:, 0] == v).float().mean() for v in range(3)])
    assert ((first - law).abs() < 4 * (law * (1 - law) / 2000).sqrt()).all()


@pytest.mark.slow
def test_populations_differ_less() -> None:
    """With a sharp reward the noise of fresh draws is most of what weights are made of, if every step looks at them."""
    length, kl = 40, 0.5
    denoiser = ts.from_logits(lambda x: torch.zeros(len(x), length, 3), 2, ignores_time=True)
    model = ts.Diffusion(denoiser, ts.Ancestral(2), ts.uniform_steps(length), ts.template(length, 2))
    ones = torch.arange(length + 1.0, dtype=torch.float64)
    ways = math.lgamma(length + 1) - torch.lgamma(ones + 1) - torch.lgamma(length - ones + 1)
    exact = float(torch.logsumexp(ways - length * math.log(2) - (ones - 10).abs() / kl, 0))
    found = []
    for seed in (None, 0):
        tilt = ts.Tilt(lambda x: -((x == 1).sum(-1) - 10).abs().float(), kl, draws=4, estimator=ts.Sampled(seed))
        result = ts.smc(ts.Steering(model, tilt), 16, 300, when=ts.triggers.ess_below(0.5), generator=seeded())
        found.append(result.log_z.double() - exact)
    fresh, shared = found
    assert float(shared.std()) < 0.7 * float(fresh.std())
    assert float(fresh.mean()) < float(shared.mean()) - 0.5 < 0  # both are unbiased, but the one misses more of it


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_draws_on_every_device(device: str) -> None:
    logits = torch.randn(6, 9, 5, generator=seeded())
    x = torch.where(torch.rand(6, 9, generator=seeded(1)) < 0.6, 4, 1)

    def drawn(on: str) -> torch.Tensor:
        denoiser = ts.from_logits(lambda x: logits.to(on)[: len(x)], 4, ignores_time=True)
        look = NoisyState(x.to(on), denoiser(x.to(on), 0.5), 0.5, 4)
        return ts.Sampled(seed=2).clean(ts.Tilt(B.reward, draws=3), look, None).cpu()

    assert torch.equal(drawn(device), drawn("cpu"))
    assert torch.equal(drawn(device)[:, x != 4], x[x != 4].expand(3, -1))
