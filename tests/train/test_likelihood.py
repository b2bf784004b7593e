"""Proposals trained by likelihood, held-out paths, and the scale that they choose."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from learned_toys import Table
from narrow import some
from torch import Tensor
from toys import Toy, seeded

import tokensteer as ts
from tokensteer.testing import enumerate_steering
from tokensteer.train import HeldOut, Likelihood, ProposalPlan, choose_scale, fit_proposal, masked_bound
from tokensteer.train import proposal_trainee as trainee
from tokensteer.train.held_out import held_out
from tokensteer.train.likelihood import share_of_masks_to_time
from tokensteer.train.paths import walk

B = Toy("B")


def as_denoiser(net: torch.nn.Module) -> ts.Denoiser:
    return ts.from_logits(net, B.mask_id, ignores_time=True)


def one_site() -> ts.Diffusion:
    """One site opens in each step: then the optimal proposal is a distribution of one token."""
    kernel = ts.Ranked(B.mask_id, count=lambda step, masked: torch.ones_like(masked))
    return replace(B.model("mdm"), kernel=kernel, steps=ts.uniform_steps(B.length))


def learn(checkpoint=None, rounds: int = 12, model: ts.Diffusion | None = None, **options: Any):
    settings = {
        "paths": 256,
        "updates": 25,
        "on_policy": 0.5,
        "replay": 12,
        "rate": 0.1,
        "average": 0.98,
        "clip": 100.0,
    }
    steering = ts.Steering(one_site() if model is None else model, B.tilt("mdm", ramp=ts.ramps.linear))
    learned = fit_proposal(
        steering,
        Table(4, B.length),
        as_denoiser,
        plan=ProposalPlan(rounds, **(settings | options)),
        generator=seeded(1),
        objective=Likelihood(64),
        checkpoint=checkpoint,
    )
    return steering, learned


def test_it_comes_close_to_the_optimal_proposal() -> None:
    """Not to equal weights: the tables of this toy contradict one another, so that a token's distribution depends on
    when its site opens."""
    steering, learned = learn()
    result = ts.prop_amot(steering.model, some(steering.twist), learned.denoiser)(64, 20, generator=seeded(2))
    base = ts.prop_amot(steering.model, some(steering.twist), steering.model.base.denoiser)(64, 20, generator=seeded(2))
    assert float(base.ess[-1].mean() / 64) < 0.7
    assert float(result.ess[-1].mean() / 64) > 0.9
    assert float((result.log_z - enumerate_steering(steering).log_z).abs().max()) < 0.1


@pytest.mark.parametrize("held", [0, 64])
def test_killed_and_resumed_is_the_same_run(tmp_path, monkeypatch, held: int) -> None:
    options: dict[str, Any] = {"rounds": 4, "updates": 3, "held_out": held, "report_every": 1, "save_every": 1}
    _, whole = learn(**options)
    walked = 0

    def dies(*args, **kwargs):
        nonlocal walked
        walked += 1
        if walked > 5:
            raise KeyboardInterrupt
        return walk(*args, **kwargs)

    monkeypatch.setattr(trainee, "walk", dies)
    with pytest.raises(KeyboardInterrupt):
        learn(tmp_path / "half.safetensors", **options)
    monkeypatch.setattr(trainee, "walk", walk)
    _, resumed = learn(tmp_path / "half.safetensors", **options)
    for a, b in zip(whole.net.parameters(), resumed.net.parameters(), strict=True):
        assert torch.equal(a, b)
    assert [replace(e, seconds=0.0) for e in whole.history] == [replace(e, seconds=0.0) for e in resumed.history]
    assert whole.rows == resumed.rows
    assert all((entry.held_out is not None) == bool(held) for entry in whole.history)


def test_the_best_held_out_proposal_is_returned() -> None:
    """A rate that is far too high spoils what was learned: the last report must be of an earlier proposal."""
    steering, learned = learn(rounds=6, rate=4.0, average=0.0, held_out=512, report_every=1)
    found = [some(entry.held_out) for entry in learned.history]
    assert found[-1] == max(found, key=lambda trial: trial.ess)
    own = replace(steering, proposal=ts.Amortised(learned.denoiser))
    assert held_out(own, 512, seeded()).ess == pytest.approx(found[-1].ess, abs=1e-6)


def test_log_z_counts_where_it_is_clear() -> None:
    even, all_of_it = HeldOut(0.9, -3.0, 0.05), HeldOut(0.4, -2.5, 0.05)
    assert all_of_it.beats(even)
    assert not even.beats(all_of_it)  # it misses a part of the target
    assert HeldOut(0.9, -2.55, 0.05).beats(all_of_it)
    assert not HeldOut(0.3, -2.4, 0.05).beats(all_of_it)


def test_the_scale_of_a_proposal_that_goes_too_far() -> None:
    """A proposal with twice the logits that are needed is best at half the scale."""
    model, tilt = one_site(), B.tilt("mdm", ramp=ts.ramps.linear)
    _, learned = learn()

    def twice(x: Tensor) -> Tensor:
        p, q = model.denoiser(x, 0.5), learned.denoiser(x, 0.5)
        return (2.0 * q - p).nan_to_num(nan=-1e4, neginf=-1e4)

    far = ts.Amortised(ts.from_logits(twice, B.mask_id, ignores_time=True))
    best, found = choose_scale(ts.Steering(model, tilt), far, 2048, seeded(), scales=(1.0, 0.75, 0.5, 0.25))
    assert best == 0.5
    assert found[0.5].ess > max(found[1.0].ess, found[0.25].ess) + 0.05


def test_weights_are_tempered_until_enough_paths_count() -> None:
    steering = ts.Steering(B.model("mdm"), B.tilt("mdm"))
    paths = walk(steering, 64, seeded(), twists=False).scaled(20.0)
    exact = (paths.log_twist[-1] + paths.log_ratio.sum(0)).double()
    for least in (0.0, 0.5):
        weights = Likelihood(least=least).weights(paths, 1)
        shares = weights / weights.sum()
        size = 1.0 / float(shares.square().sum())
        assert float(weights.sum()) == pytest.approx(size, rel=1e-6)
        if least:
            assert size == pytest.approx(32, abs=0.5)
        else:
            torch.testing.assert_close(shares, exact.softmax(-1))


def test_fixed_sites_are_never_masked() -> None:
    x0, free = torch.randint(0, 3, (4096, 6), generator=seeded()), torch.ones(4096, 6, dtype=torch.bool)
    free[:, :2] = False
    seen: list[Tensor] = []

    def predict(x: Tensor, t: Tensor) -> Tensor:
        seen.append(x)
        return torch.full((*x.shape, 4), -1.0)

    nats = masked_bound(predict, x0, 3, seeded(), free=free)
    assert torch.equal(seen[0][:, :2], x0[:, :2])
    assert (seen[0] == 3).any(-1).all()
    torch.testing.assert_close(nats, torch.full_like(nats, 4.0))  # one nat for each of the four free sites


def test_prompts_are_kept() -> None:
    canvas = ts.template(B.length, B.mask_id).repeat(2, 1)
    canvas[0, 0], canvas[1, 1] = 1, 2
    model = replace(B.model("mdm"), template=canvas)
    steering, learned = learn(model=model, rounds=2, updates=2, held_out=64)
    result = ts.prop_amot(steering.model, some(steering.twist), learned.denoiser)(4, 2, generator=seeded())
    assert (result.samples[0, :, 0] == 1).all()
    assert (result.samples[1, :, 1] == 2).all()


def test_times_of_a_schedule() -> None:
    kernel = ts.Ancestral(B.mask_id, ts.Cosine())
    to_time = share_of_masks_to_time(replace(B.model("mdm"), kernel=kernel, steps=ts.uniform_steps(200)))
    for t in (0.2, 0.5, 0.9):
        share = torch.tensor([math.cos(math.pi / 2 * (1.0 - t))])
        assert float(to_time(share)) == pytest.approx(t, abs=0.01)


def test_refused() -> None:
    with pytest.raises(ValueError, match="no regularisers"):
        learn(kl=0.1)
    with pytest.raises(ValueError, match=r"Likelihood.*least"):
        Likelihood(least=1.0)
