"""Triggers that look rarely, and which of them the named methods use."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checks import answer
from toys import Toy

import tokensteer as ts
from tokensteer.core.particles.triggers import looks
from tokensteer.core.steering.methods import usual_trigger

TOY = Toy("C")


@pytest.mark.parametrize("count", [10, 16, 50, 64, 100, 128, 1000])
def test_weights_are_looked_at_so_often(count: int):
    """Once in each tenth of the time but the first, whatever the rounding of times."""
    rarely = ts.triggers.ess_below(0.5, 10)
    seen = [step.t for step in ts.uniform_steps(count) if looks(rarely, step)]
    assert len(seen) == 9
    for k, t in enumerate(seen):
        assert 0.9 - k / 10 - 1e-9 <= t <= 0.9 - k / 10 + 1 / count


def test_a_rare_look_keeps_the_target():
    steering = ts.Steering(TOY.model("mdm"), ts.Tilt(TOY.reward, TOY.kl, draws=2))
    exact = answer(steering.model, steering.twist).log_z
    result = ts.smc(steering, 8, 4000, when=ts.triggers.ess_below(0.5, 2), generator=torch.Generator().manual_seed(0))
    log_z, error = result.pooled_log_z
    assert abs(log_z - exact) < 4 * error
    assert result.ancestors.diff(dim=-1).ne(1).any()  # it does resample


def test_methods_look_rarely_where_looks_are_costly():
    """Ten looks for long sequences and estimates from draws; every step for short ones, closed forms and gradients."""
    network = ts.from_logits(lambda x: torch.zeros(*x.shape, 3), 2, ignores_time=True)
    long = ts.Diffusion(network, ts.Ancestral(2), ts.uniform_steps(50), ts.template(40, 2))
    short = replace(long, template=ts.template(4, 2))
    tilt = ts.Tilt(lambda x: (x == 0).sum(-1).double(), differentiable=False)
    closed = replace(tilt, estimator=ts.Value(lambda x, t: torch.zeros(len(x), dtype=torch.float64)))

    def count(method: ts.Method) -> int:
        return sum(looks(method.when, step) for step in method.steering.steps)

    assert count(ts.smc_base(long, tilt)) == count(ts.smc_amot(long, tilt, network)) == 9
    assert count(ts.smc_base(short, tilt)) == count(ts.smc_base(long, closed)) == 50
    assert count(ts.Method(ts.Steering(long, tilt), when=usual_trigger(long, replace(tilt, ramp=ts.Adaptive())))) == 50
    rows = [ts.smc_base(long, replace(tilt, draws=4)), ts.Method(ts.Steering(long, replace(tilt, draws=4)))]
    few, many = (method(4, 2, generator=torch.Generator().manual_seed(0)).rows["reward"] for method in rows)
    assert few < many / 3
