"""Estimates that are averaged over a particle's recent steps: which averages, and that targets stay."""

from dataclasses import replace

import pytest
import torch

import tokensteer as ts
from tests.helpers.checks import answer, trial
from tests.helpers.narrow import some
from tests.helpers.toys import Toy
from tokensteer.testing import enumerate_steering

A, B = Toy("A"), Toy("B")
NOISY = {"estimator": ts.Sampled(), "draws": 2}
GENTLE = ts.Gradient(clip=1.0, tokens_only=True)


PROPOSALS = pytest.mark.parametrize("proposal", [ts.FromModel(), GENTLE], ids=["base", "gradient"])


@pytest.mark.parametrize("sampler", ["mdm", "remdm", "lowconf"])
@PROPOSALS
def test_the_target_stays(sampler, proposal):
    path = ts.Steering(A.model(sampler), A.tilt(sampler, smoothing=0.7, **NOISY), proposal)
    outcome = trial(path, answer(path.model, path.twist), populations=4096)
    assert outcome.unbiased, str(outcome)


@pytest.mark.parametrize("potential", [ts.potentials.maximum, ts.potentials.total], ids=["max", "sum"])
def test_the_target_stays_with_memory(potential):
    tilt = A.tilt("mdm", smoothing=0.7, potential=potential, **NOISY)
    path = ts.Steering(A.model("mdm"), tilt, GENTLE)
    outcome = trial(path, answer(path.model, path.twist), populations=4096)
    assert outcome.unbiased, str(outcome)


def one_step(proposal, sharing):
    """What 60 particles move to, which of them have moved, and the estimates there with and without smoothing."""
    model = replace(B.model("mdm"), sharing=sharing)
    steep, smooth = (
        ts.Steering(model, B.tilt("mdm", smoothing=share, ramp=ts.ramps.constant, **NOISY), proposal)
        for share in (None, 0.7)
    )
    x = torch.full((60, B.length), B.mask_id)
    first = smooth.evaluate(x, smooth.steps[0].t, seeded(1))
    moved = smooth.move(x, first, smooth.steps[0], seeded(2))
    there = (moved.x != x).any(-1)
    assert there.any()
    assert not there.all()
    return steep, smooth, moved, there


def estimates(path, moved, rows):
    parent = moved.parent.take(rows)
    found = path.evaluate(moved.x[rows], path.steps[1].t, seeded(3), parent).reward
    return some(found), some(parent.reward)


@pytest.mark.parametrize("sharing", [True, False], ids=["sharing", "each row"])
@PROPOSALS
def test_what_is_averaged(proposal, sharing):
    """The estimate of a particle that has moved is .3 of the new one and .7 of that of the step before. One that has
    not moved keeps its estimate where rows are shared, and is estimated again, and averaged, elsewhere."""
    steep, smooth, moved, there = one_step(proposal, sharing)
    for rows in (torch.arange(60), there.nonzero().squeeze(-1)):  # some of them have moved, all of them have
        new, before = estimates(smooth, moved, rows)
        alone, _ = estimates(steep, moved, rows)
        averaged = there[rows] | (not sharing)
        assert torch.allclose(new[averaged], (0.7 * before + 0.3 * alone)[averaged])
        assert torch.equal(new[~averaged], before[~averaged])


def test_a_twist_of_the_state_alone_is_not_averaged():
    """Learned twists replace the estimates, and Enumerated needs the log-twist of every state that may come."""
    tilt = B.tilt("mdm", smoothing=0.7)
    learned = ts.LearnedTwist(lambda x, t: torch.zeros(len(x)))
    assert learned.on(tilt).smoothing == 0.0
    with pytest.raises(ValueError, match="and no smoothing"):
        ts.smc(ts.Steering(B.model("mdm"), tilt, ts.Enumerated()), 2)


def test_enumeration_leaves_averages_out():
    exact, averaged = (
        enumerate_steering(ts.Steering(A.model("mdm"), A.tilt("mdm", smoothing=share))) for share in (0.0, 0.7)
    )
    assert averaged.log_z == exact.log_z


def test_off_unless_asked_for():
    assert ts.Tilt(A.reward).smoothing is None
    estimates, before = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    for smoothing in (None, 0.0):
        assert ts.Tilt(A.reward, smoothing=smoothing).smoothed(estimates, before) is estimates
    assert ts.Tilt(A.reward, smoothing=0.5).smoothed(estimates, None) is estimates


@pytest.mark.parametrize("smoothing", [1.0, -0.1, float("nan")])
def test_shares_out_of_range(smoothing):
    with pytest.raises(ValueError, match=r"Tilt\.smoothing"):
        ts.Tilt(A.reward, smoothing=smoothing)


def smoothing_of(method):
    return some(method.steering.twist).smoothing


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("steps", [10, 1000])
def test_what_smc_grad_chooses(steps):
    """Noisy estimates of long sequences are averaged over recent steps."""
    denoiser = ts.from_logits(lambda x: torch.zeros(*x.shape[:2], 3), mask_id=2, ignores_time=True)
    model = ts.Diffusion(denoiser, ts.Ancestral(2), ts.uniform_steps(steps), ts.template(40, 2))

    def ones(x):
        return (x[..., 1] if x.is_floating_point() else x == 1).double().sum(-1)

    def tilt(**options):
        return ts.Tilt(ones, differentiable=True, **options)

    def chosen(**options):
        return smoothing_of(ts.smc_grad(model, tilt(**options)))

    assert chosen(**NOISY) == 0.5
    assert chosen(**NOISY, smoothing=0.2) == 0.2
    assert chosen(**NOISY, smoothing=0.0) == 0.0
    assert chosen(estimator=ts.Sampled(seed=1)) is None  # one function of the state
    assert chosen(estimator=ts.SoftInput()) is None  # no noise
    assert smoothing_of(ts.smc_base(model, tilt(**NOISY))) is None
    assert smoothing_of(ts.smc_grad(A.model("mdm"), A.tilt("mdm", **NOISY))) is None  # three sites
