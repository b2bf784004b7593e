"""The planner on toys whose answers are known: what it predicts, what it chooses, what it spends."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from checks import answer
from narrow import untyped
from toys import Toy

import tokensteer as ts
from tokensteer.core.steering.planner import Pilot

torch.set_num_threads(1)

TOY = Toy("C")
BUDGET = 200_000


def steering(kl: float = 4 * TOY.kl, **options) -> ts.Steering:
    """Without sharing between twins, of which a toy has too many for rows to be in proportion to particles."""
    model = replace(TOY.model("mdm"), sharing=False)
    return ts.Steering(model, ts.Tilt(TOY.reward, kl, **options))


def spread(pilot: Pilot, populations: int, seed: int) -> float:
    """The standard deviation of Z_hat/Z of a population, from many of them."""
    setting = pilot.setting
    result = setting.method(setting.num_particles, populations, generator=torch.Generator().manual_seed(seed))
    return float((result.log_z - result.pooled_log_z[0]).exp().std())


@pytest.fixture(scope="module")
def planned() -> ts.Plan:
    return ts.plan(steering(), BUDGET, particles=(4, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_prediction_holds(planned):
    result = planned.run(generator=torch.Generator().manual_seed(1))
    assert planned.trusted
    measured = spread(planned.winner, 20_000, 2) / math.sqrt(planned.populations)
    assert 0.5 < planned.error / measured < 2
    assert 0.5 < planned.error / result.pooled_log_z[1] < 2
    assert planned.ess == pytest.approx(float(result.ess[-1].mean()) / planned.num_particles, abs=0.05)
    exact = answer(steering().model, steering().twist).log_z
    assert abs(result.pooled_log_z[0] - exact) < 4 * planned.error


def test_budget_is_kept(planned):
    result = planned.run(generator=torch.Generator().manual_seed(1))
    rows = sum(result.rows.values())
    assert rows == pytest.approx(planned.rows, rel=0.1)
    assert 0.9 * BUDGET < planned.spent + rows < 1.1 * BUDGET
    assert planned.spent < 0.25 * BUDGET
    assert result.samples.shape[:2] == (planned.populations, planned.num_particles)


@pytest.mark.slow
def test_choice_is_no_worse_than_the_median(planned):
    """By the true price of each setting that was piloted, from many populations."""
    assert len(planned.pilots) + planned.too_dear == 16
    prices = [spread(pilot, 500, 3) ** 2 * pilot.each for pilot in planned.pilots]
    taken = next(k for k, pilot in enumerate(planned.pilots) if pilot.setting is planned.winner.setting)
    assert prices[taken] <= sorted(prices)[len(prices) // 2]
    assert taken < 3


def test_a_clear_choice_is_made():
    """A twist that is exact against one that misleads, and a reward that is dear to look at against rarely."""
    misled = {"none": ts.ramps.end, "full": ts.ramps.constant}
    path = replace(steering(), twist=TOY.tilt("mdm"))
    plan = ts.plan(path, 300_000, particles=(16,), ramps=misled, generator=torch.Generator().manual_seed(0))
    assert plan.winner.setting.ramp == "full"
    looks = {"always": ts.triggers.always, "never": ts.triggers.never}
    flat = ts.Steering(path.model, ts.Tilt(lambda x: 0.1 * (x == 0).sum(-1), 1.0, draws=16))
    plan = ts.plan(
        flat, 300_000, particles=(8,), draws=(16,), triggers=looks, generator=torch.Generator().manual_seed(0)
    )
    assert plan.winner.setting.trigger == "never"


def test_same_seed_same_plan_and_it_prints(planned):
    again = ts.plan(steering(), BUDGET, particles=(4, 16), generator=torch.Generator().manual_seed(0))
    assert str(again) == str(planned)
    text = str(planned)
    assert f"{planned.populations} × {planned.num_particles} particles" in text
    assert f"± {planned.error:.4f}" in text
    listed = [line for line in text.splitlines() if "every 1" in line or "ess below" in line]
    assert len(listed) == len(planned.pilots)
    assert len([line for line in listed if "*" in line]) == 1
    assert all(len(line) <= 120 for line in text.splitlines())


def test_too_few_particles_are_said():
    plan = ts.plan(
        steering(TOY.kl / 3), 200_000, particles=(4,), draws=(1,), generator=torch.Generator().manual_seed(0)
    )
    assert not plan.trusted
    assert "Pilot more particles" in str(plan)


def test_dear_settings_are_left_out():
    plan = ts.plan(steering(), BUDGET, particles=(4, 4096), generator=torch.Generator().manual_seed(0))
    assert plan.too_dear == 8
    assert "8 more settings were too dear" in str(plan)
    assert plan.num_particles == 4


def test_products_have_no_draws_or_ramps():
    path = ts.Steering(TOY.product("mdm", 1.2, 0.8), None, ts.Optimal())
    plan = ts.plan(path, 100_000, particles=(8,), generator=torch.Generator().manual_seed(0))
    assert {pilot.setting.draws for pilot in plan.pilots} == {None}
    assert plan.run(generator=torch.Generator().manual_seed(1)).samples.shape[1] == 8


def test_what_cannot_be_planned_is_said():
    with pytest.raises(ValueError, match="too small to pilot 16 settings") as error:
        ts.plan(steering(), 2000, particles=(4, 16), generator=torch.Generator().manual_seed(0))
    enough = int(str(error.value).split("Give at least ")[1].split(" rows")[0].replace(",", ""))
    ts.plan(steering(), enough, particles=(4, 16), generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="share"):
        ts.plan(steering(), BUDGET, share=1.5)
    with pytest.raises(ValueError, match="at least one number of particles"):
        ts.plan(steering(), BUDGET, particles=())
    many = replace(untyped(steering().model), template=torch.full((2, TOY.length), TOY.mask_id))
    with pytest.raises(ValueError, match="one template"):
        ts.plan(replace(steering(), model=many), BUDGET)
