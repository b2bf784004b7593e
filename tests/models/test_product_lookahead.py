"""The look-ahead of products: the mass of sites still masked is part of the twist."""

from __future__ import annotations

import pytest
import torch
from checks import POWERS, answer, trial
from product_toys import ProductToy, near
from toys import Toy, seeded

import tokensteer as ts
from tokensteer.testing import enumerate_steering

B = Toy("B")


@pytest.mark.parametrize("powers", [(1.0, 1.0), POWERS, (0.7, 0.7)])
@pytest.mark.parametrize("sampler", ["mdm", "remdm", "lowconf"])
def test_it_changes_no_target(sampler: str, powers: tuple[float, float]) -> None:
    """By enumeration, with both proposals."""
    found = [
        enumerate_steering(ts.Steering(B.product(sampler, *powers, lookahead=ahead), None, proposal))
        for ahead in (False, True)
        for proposal in (ts.Guided(), ts.Optimal())
    ]
    for other in found[1:]:
        assert torch.allclose(other.target, found[0].target, atol=1e-12)
        assert abs(other.log_z - found[0].log_z) < 1e-10


@pytest.mark.fast
@pytest.mark.parametrize("tilted", [False, True])
@pytest.mark.parametrize("sampler", ["mdm", "remdm", "lowconf"])
def test_weights_are_unbiased(sampler: str, tilted: bool) -> None:
    model = B.product(sampler, 1.0, 1.0, lookahead=True)
    path = ts.Steering(model, B.tilt(sampler) if tilted else None, ts.Guided())
    found = trial(path, answer(model, path.twist, path.proposal), 4, 4096, 0)
    assert found.unbiased, found


@pytest.mark.parametrize("powers", [(1.0, 1.0), (2.0,), (1.5, -0.5), (0.7, 0.7)])
@pytest.mark.parametrize(("tokens", "length"), [(10, 3), pytest.param(3, 6, marks=pytest.mark.slow)])
def test_samples_are_near_the_floor(tokens: int, length: int, powers: tuple[float, ...]) -> None:
    """Exact denoisers. The distance of weighted samples to the target is near that of as many iid draws, and resampling
    keeps particles however many sites they have opened. If powers do not sum to one, it is twice to four times as far
    without look-ahead."""
    found = near(ProductToy(tokens, length, powers), ts.Guided(), particles=64, populations=64, sets=1, seed=0)
    assert found.tv < 1.3 * found.floor
    assert found.ess > 0.8
    assert abs(found.z) < 3


@pytest.mark.parametrize("target", ["product", "product+tilt"])
def test_enumeration_aims_at_it(target: str) -> None:
    """q* ∝ p · exp(psi_s) with all of psi_s: given x_t the weight does not depend on the draw."""
    model = B.product("mdm", 1.0, 1.0, lookahead=True)
    path = ts.Steering(model, B.tilt("mdm") if "tilt" in target else None, ts.Enumerated())
    x, step = model.start(256, None), path.steps[0]
    evaluation = path.evaluate(x, step.t, None)
    moved = path.move(x, evaluation, step, seeded())
    after = path.evaluate(moved.x, step.s, None, moved.parent)
    assert (moved.log_ratio + after.log_twist).std() < 1e-9


def test_a_site_without_mass_may_recover() -> None:
    """Two models that rule out each other's tokens now: the twist stays finite."""
    rows = [torch.tensor([[0.0, -torch.inf, -torch.inf]]), torch.tensor([[-torch.inf, 0.0, -torch.inf]])]
    models = [
        ts.Diffusion(
            lambda x, t, row=row: row.expand(*x.shape, 3).double(),
            ts.Ancestral(2),
            ts.uniform_steps(2),
            ts.template(2, 2),
        )
        for row in rows
    ]
    model = ts.Product(models, (1.0, 1.0))
    assert model.log_lookahead(model.predict(model.start(3, None), 1.0)).isfinite().all()


def test_it_is_the_default_unless_powers_sum_to_one() -> None:
    """Where sites depend on each other the sum over sites overstates; powers that sum to one hardly need it."""
    for powers, ahead in (((1.0, 1.0), True), ((0.7, 0.7), True), ((1.5, -0.5), False), ((3.0, -2.0), False)):
        assert B.product("mdm", *powers, lookahead=None).looks_ahead is ahead
    assert B.product("mdm", 1.5, -0.5, lookahead=True).looks_ahead
    assert not B.product("mdm", 1.0, 1.0, lookahead=False).looks_ahead
