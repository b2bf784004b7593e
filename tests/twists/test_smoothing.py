"""Estimates that are averaged over a particle's recent steps: which averages, and that targets stay."""

import pytest
import torch

import tokensteer as ts
from tests.helpers.checks import answer, trial
from tests.helpers.narrow import some
from tests.helpers.toys import Toy

A, B = Toy("A"), Toy("B")
NOISY = {"estimator": ts.Sampled(), "draws": 2}
GENTLE = ts.Gradient(clip=1.0, tokens_only=True)


@pytest.mark.parametrize("sampler", ["mdm", "remdm", "lowconf"])
@pytest.mark.parametrize("proposal", [ts.FromModel(), GENTLE], ids=["base", "gradient"])
def test_the_target_stays(sampler, proposal):
    path = ts.Steering(A.model(sampler), A.tilt(sampler, smoothing=0.7, **NOISY), proposal)
    outcome = trial(path, answer(path.model, path.twist), populations=4096)
    assert outcome.unbiased, str(outcome)


@pytest.mark.parametrize("proposal", [ts.FromModel(), GENTLE], ids=["base", "gradient"])
def test_what_is_averaged(proposal):
    """Particles that moved have .3 of the new estimate and .7 of that of the step before; the others keep theirs."""
    steep, smooth = (
        ts.Steering(B.model("mdm"), B.tilt("mdm", smoothing=share, ramp=ts.ramps.constant, **NOISY), proposal)
        for share in (None, 0.7)
    )
    x = torch.full((60, B.length), B.mask_id)
    first = smooth.evaluate(x, smooth.steps[0].t, seeded(1))
    moved = smooth.move(x, first, smooth.steps[0], seeded(2))
    there = (moved.x != x).any(-1)
    assert there.any()
    assert not there.all()
    new, old = (path.evaluate(moved.x, path.steps[1].t, seeded(3), moved.parent).reward for path in (smooth, steep))
    assert first.reward is not None
    assert new is not None
    assert old is not None
    assert torch.allclose(new[there], 0.7 * first.reward[there] + 0.3 * old[there])
    assert torch.equal(new[~there], first.reward[~there])


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


@pytest.mark.parametrize(("steps", "share"), [(50, 0.5), (100, 0.75), (10, 0.0)])
def test_what_smc_grad_chooses(steps, share):
    """Noisy estimates of long sequences are averaged over recent steps, more of them where there are more."""
    denoiser = ts.from_logits(lambda x: torch.zeros(*x.shape[:2], 3), mask_id=2, ignores_time=True)
    model = ts.Diffusion(denoiser, ts.Ancestral(2), ts.uniform_steps(steps), ts.template(40, 2))

    def ones(x):
        return (x[..., 1] if x.is_floating_point() else x == 1).double().sum(-1)

    def tilt(**options):
        return ts.Tilt(ones, differentiable=True, **options)

    def chosen(**options):
        return smoothing_of(ts.smc_grad(model, tilt(**options)))

    assert chosen(**NOISY) == pytest.approx(share)
    assert chosen(**NOISY, smoothing=0.2) == 0.2
    assert chosen(**NOISY, smoothing=0.0) == 0.0
    assert chosen(estimator=ts.Sampled(seed=1)) is None  # one function of the state
    assert chosen(estimator=ts.SoftInput()) is None  # no noise
    assert smoothing_of(ts.smc_base(model, tilt(**NOISY))) is None
    assert smoothing_of(ts.smc_grad(A.model("mdm"), A.tilt("mdm", **NOISY))) is None  # three sites
