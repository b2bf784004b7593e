"""The planner on toys whose answers are known: what it predicts, what it chooses, what it spends."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from checks import answer
from narrow import some, untyped
from toys import Toy

import tokensteer as ts
from tokensteer.core.proposals.proposal import FromModel, of_kind
from tokensteer.core.steering.pilots import Budget, Pilot, Setting
from tokensteer.core.steering.planner import _sized, usual_proposals
from tokensteer.core.steering.sizing import APART, FILLED, SHOWN, most_within, predicted_seconds

torch.set_num_threads(1)

TOY = Toy("C")
BUDGET = 60_000


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
    assert rows == pytest.approx(planned.cost, rel=0.1)
    assert 0.9 * BUDGET < planned.spent + rows < 1.1 * BUDGET
    assert planned.spent < 0.25 * BUDGET
    assert result.samples.shape[:2] == (planned.populations, planned.num_particles)


@pytest.mark.slow
def test_choice_is_no_worse_than_the_median(planned):
    """By the true price of each setting that was piloted, from many populations."""
    assert len(planned.pilots) + planned.too_dear == 1 + 2 + 1 + 1 + 1  # triggers, ramps, draws, particles
    prices = [spread(pilot, 500, 3) ** 2 * pilot.each for pilot in planned.pilots]
    taken = next(k for k, pilot in enumerate(planned.pilots) if pilot.setting is planned.winner.setting)
    assert prices[taken] <= sorted(prices)[len(prices) // 2]
    assert taken < 3


def test_a_clear_choice_is_made():
    """A twist that is exact against one that misleads, and a reward that is dear to look at against rarely."""
    misled = {"none": ts.ramps.end, "full": ts.ramps.constant}
    path = replace(steering(), twist=TOY.tilt("mdm"))
    when = {"ess": ts.triggers.ess_below(0.5)}
    plan = ts.plan(
        path, 100_000, particles=(16,), ramps=misled, triggers=when, generator=torch.Generator().manual_seed(0)
    )
    assert plan.winner.setting.names["ramp"] == "full"
    looks = {"always": ts.triggers.always, "never": ts.triggers.never}
    flat = ts.Steering(path.model, ts.Tilt(lambda x: 0.1 * (x == 0).sum(-1), 1.0, draws=16))
    plan = ts.plan(
        flat, 150_000, particles=(8,), draws=(16,), triggers=looks, generator=torch.Generator().manual_seed(0)
    )
    assert plan.winner.setting.names["trigger"] == "never"


def test_same_seed_same_plan_and_it_prints(planned):
    again = ts.plan(steering(), BUDGET, particles=(4, 16), generator=torch.Generator().manual_seed(0))
    assert str(again) == str(planned)
    text = str(planned)
    assert f"{planned.populations} × {planned.num_particles} particles" in text
    assert f"± {planned.error:.4f}" in text
    table = text.splitlines()[-len(planned.pilots) :]
    listed = [line for line in table if "every:1" in line or "ess:0.5" in line or "never" in line]
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
    assert plan.too_dear
    assert f"{plan.too_dear} more settings were too dear" in str(plan)
    assert plan.num_particles == 4


def test_products_have_no_draws_or_ramps():
    path = ts.Steering(TOY.product("mdm", 1.2, 0.8), None, ts.Optimal())
    plan = ts.plan(path, 100_000, particles=(8,), generator=torch.Generator().manual_seed(0))
    assert set(plan.winner.setting.names) == {"trigger", "proposal", "particles"}
    assert plan.run(generator=torch.Generator().manual_seed(1)).samples.shape[1] == 8


def bits(**options) -> ts.Steering:
    """Forty sites towards ones, in forty steps."""
    denoiser = ts.from_logits(lambda x: torch.zeros(*x.shape[:2], 3), mask_id=2, ignores_time=True)
    model = ts.Diffusion(denoiser, ts.Ancestral(2), ts.uniform_steps(40), ts.template(40, 2))

    def ones(x):
        return 0.2 * (x[..., 1] if x.is_floating_point() else x == 1).double().sum(-1)

    return ts.Steering(model, ts.Tilt(ones, draws=2, differentiable=True, **options))


ALONE = {"draws": (2,), "ramps": {"linear": ts.ramps.linear}, "triggers": {"ess": ts.triggers.ess_below(0.5)}}


def smoothing(method: ts.Method) -> float | None:
    return some(method.steering.twist).smoothing


@pytest.mark.parametrize(("given", "used"), [(None, 0.5), (0.2, 0.2)])
def test_gradients_are_piloted_as_smc_grad_runs_them(given, used):
    """With its averages over recent steps, unless the tilt has its own. Others make no estimate in every step."""
    path = bits(smoothing=given)
    method = ts.smc_grad(path.model, some(path.twist))
    assert smoothing(method) == used
    plan = ts.plan(path, 60_000, particles=(2,), generator=torch.Generator().manual_seed(0), **ALONE)
    found = {pilot.setting.names["proposal"]: pilot.setting.method for pilot in plan.compared["proposal"]}
    assert found["gradient"].steering.proposal == method.steering.proposal
    shares = {name: smoothing(one) for name, one in found.items()}
    assert dict.fromkeys(("gradient", "gradient, clip 3", "half gradient"), used).items() <= shares.items()
    assert shares["the model"] == shares["gradient, every 4"] == given
    assert smoothing(plan.method) == shares[plan.winner.setting.names["proposal"]]


@pytest.mark.parametrize(("given", "used"), [(None, 0.5), (0.0, 0.0)])
def test_the_plan_runs_the_smoothing_that_was_piloted_and_says_so(given, used):
    """The run is that of smc_grad to the last digit."""
    path = bits(smoothing=given)
    mine = {"mine": ts.Gradient(clip=1.0, tokens_only=True)}
    plan = ts.plan(path, 10_000, particles=(4,), proposals=mine, generator=torch.Generator().manual_seed(0), **ALONE)
    ran = plan.run(generator=torch.Generator().manual_seed(1))
    method = ts.smc_grad(path.model, some(path.twist))
    same = method(plan.num_particles, plan.populations, generator=torch.Generator().manual_seed(1))
    assert torch.equal(ran.log_w, same.log_w)
    assert plan.smoothing == used
    line = f"  smoothing {used:g}, an average over recent steps"
    assert (line in str(plan)) == ("smoothing" in plan.reasons) == bool(used)
    assert plan.winner.setting.names["proposal"] == "mine"
    assert list(plan.reasons)[: 4 if used else 3] == ["trigger", "ramp", "proposal", *["smoothing"] * bool(used)]


def test_a_task_may_have_clips_of_its_own():
    """The first is that of the gradient that is tried first, the steepest that of the mixture."""
    path = bits()
    found = usual_proposals(path, (30.0, 3.0))
    names = ["the model", "gradient, clip 30", "gradient, clip 30, every 4", "gradient, clip 3", "half gradient"]
    assert list(found) == names
    assert [gradient.clip for gradient in map(gradient_of, list(found.values())[1:])] == [30.0, 30.0, 3.0, 30.0]
    assert [gradient_of(one).clip for one in list(usual_proposals(path).values())[1:]] == [1.0, 1.0, 3.0, 3.0]
    assert gradient_of(usual_proposals(path, (None, 3.0))["half gradient"]).clip is None
    own = replace(path, proposal=ts.Gradient(clip=1.0, tokens_only=True))
    assert list(usual_proposals(own)) == ["gradient", "the model", *list(usual_proposals(path))[2:]]


def gradient_of(proposal: ts.Proposal) -> ts.Gradient:
    return of_kind(proposal, ts.Gradient)[0]


def test_a_tilt_with_another_part_shares_what_is_known_of_memory():
    """Pilots that run out of memory would otherwise do so again in each setting."""
    tilt = some(bits().twist)
    for other in (tilt.with_ramp(ts.ramps.constant), tilt.with_smoothing(0.3), tilt.with_draws(7)):
        assert other.chunks is tilt.chunks
        assert other.meter is tilt.meter
    assert tilt.with_ramp(ts.ramps.constant).ramp is ts.ramps.constant
    assert tilt.with_smoothing(0.3).smoothing == 0.3


def test_proposals_are_chosen():
    """The model against a proposal that prefers one token; and the reason names both."""
    favoured = torch.zeros(TOY.length, TOY.mask_id + 1).index_fill(1, torch.tensor([0]), 3.0)
    biased = ts.from_logits(lambda x: favoured.expand(len(x), -1, -1), TOY.mask_id, ignores_time=True)
    proposals = {"biased": ts.Amortised(biased), "the model": FromModel()}
    plan = ts.plan(
        steering(),
        50_000,
        particles=(8,),
        proposals=proposals,
        ramps=SAME,
        triggers={"ess": ts.triggers.ess_below(0.5)},
        draws=(1,),
        generator=torch.Generator().manual_seed(0),
    )
    assert plan.winner.setting.names["proposal"] == "the model"
    assert plan.reasons["proposal"].startswith("the model (biased: ")
    assert plan.reasons["proposal"] in str(plan)
    assert plan.method.steering.proposal == FromModel()


SAME = {"constant": ts.ramps.constant}


def test_particles_can_take_the_rest():
    plan = ts.plan(
        steering(), 50_000, populations=4, particles=(8,), generator=torch.Generator().manual_seed(0), ramps=SAME
    )
    assert plan.populations == 4
    assert 30_000 < plan.cost < 50_000
    result = plan.run(generator=torch.Generator().manual_seed(1))
    assert sum(result.rows.values()) == pytest.approx(plan.cost, rel=0.1)


def test_seconds_are_kept():
    """Within a wide margin: a machine that others use is no clock."""
    began = time.perf_counter()
    plan = ts.plan(steering(), "2s", particles=(8,), generator=torch.Generator().manual_seed(0), ramps=SAME)
    assert plan.budget == Budget(2.0, "s")
    plan.run(generator=torch.Generator().manual_seed(1))
    assert 0.2 < time.perf_counter() - began < 10
    assert " s, after pilots of " in str(plan)


def test_independent_particles_are_judged_by_their_weights():
    """A reward that one sample in sixteen meets: populations of four are mostly empty, and N var(w)/E(w)^2 is known."""
    network = ts.from_logits(lambda x: torch.zeros(*x.shape, 3), 2, ignores_time=True)
    model = ts.Diffusion(network, ts.Ancestral(2), ts.uniform_steps(4), ts.template(4, 2))
    tilt = ts.Tilt(lambda x: torch.where((x == 0).all(-1), 0.0, -20.0), ramp=ts.ramps.end)
    method = ts.Method(ts.Steering(model, tilt), when=ts.triggers.never)
    pilot = Setting(4, method).run(4000, Budget(1, "rows"), torch.Generator().manual_seed(0))
    assert pilot.scatter > 5
    assert some(pilot.iid_spread) == pytest.approx(math.sqrt(15 / 4), rel=0.05)
    assert pilot.price == pytest.approx(math.log(15 / 4 * pilot.each), abs=0.1)
    resampled = replace(method, when=ts.triggers.always, resample=ts.resampling.multinomial)
    assert Setting(4, resampled).run(8, Budget(1, "rows"), torch.Generator().manual_seed(0)).iid_spread is None


@pytest.mark.parametrize(
    ("given", "budget"), [(7, (7, "rows")), ("30", (30, "rows")), ("1.5 min", (90.0, "s")), ("2H", (7200.0, "s"))]
)
def test_budgets_are_read(given, budget):
    assert Budget.of(given) == Budget(*budget)


@pytest.mark.parametrize("given", ["", "0", "0s", "-3s", "5 days", 0, 2.5, True])
def test_what_is_no_budget_is_said(given):
    with pytest.raises(ValueError, match="budget must be"):
        ts.plan(steering(), given)


def test_what_cannot_be_planned_is_said():
    with pytest.raises(ValueError, match="too small for a pilot") as error:
        ts.plan(steering(), 30, particles=(4, 16), generator=torch.Generator().manual_seed(0))
    enough = int(str(error.value).split("Give at least ")[1].split(" rows")[0].replace(",", ""))
    ts.plan(steering(), enough, particles=(4, 16), generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="share"):
        ts.plan(steering(), BUDGET, share=1.5)
    with pytest.raises(ValueError, match="nothing to choose from in particles"):
        ts.plan(steering(), BUDGET, particles=())


def test_a_budget_too_small_for_pilots_is_spent_on_the_first_setting():
    plan = ts.plan(steering(), 500, particles=(64,), populations=2, generator=torch.Generator().manual_seed(0))
    assert not plan.compared
    assert set(plan.reasons) >= {"trigger", "proposal"}
    assert "too small for pilots" in str(plan)
    assert plan.spent + sum(plan.run(generator=torch.Generator().manual_seed(1)).rows.values()) < 600


@pytest.mark.parametrize("flat", [10, 200, 100_000])
def test_particles_for_a_time_are_measured_on_a_gpu(monkeypatch, flat):
    """A device that takes as long for many particles as for one."""
    clock = [0.0]

    def cost(particles):
        return max(0.02, 0.02 * particles / flat)

    class Gpu:
        """Takes its time and computes nothing."""

        steering = SimpleNamespace(resources=SimpleNamespace(templates=1), steps=[None] * 20)

        def __call__(self, num_particles, populations=1, *, on_step, **options):
            for k in range(21):
                clock[0] += cost(num_particles * populations) / 20 if k else 0.0
                on_step(SimpleNamespace(log_w=torch.zeros(populations, num_particles)))
            raise AssertionError("a few steps are enough")

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    setting = Setting(8, untyped(Gpu()))
    pilot = Pilot(setting, torch.zeros(1, 8), 1.0, 1.0, cost(64) / 8, cost(64))
    size, populations, fitting = _sized(pilot, Budget(1.0, "s"), 0.1, 2, None)
    assert populations == 2
    assert fitting == pytest.approx(clock[0])
    assert cost(2 * size) == pytest.approx(0.9 - fitting, rel=0.1)
    shown = SHOWN + APART / 20  # of the steps of a run
    flat_runs = 2 + math.ceil(math.log10(flat))  # the first, three times as many, and leaps of ten
    assert fitting < shown * (FILLED * 0.9 + 0.02 * flat_runs)  # with the one that nearly fills the time


@pytest.mark.parametrize(
    ("always", "each", "cold"),
    [(1.0, 0.01, 0.0), (1.0, 0.01, 1.0), (0.5, 0.05, 0.0), (0.05, 0.0005, 0.0), (0.0, 0.3, 0.0), (0.0, 0.02, 0.0)],
)
def test_what_every_run_takes_is_told_from_what_a_particle_takes(always, each, cold):
    """A run that takes a quarter of the time with one particle may take little longer with a hundred."""
    asked = []

    def seconds_of(count):
        took = always + each * count + (0.0 if asked else cold)
        asked.append(count)
        return took, SHOWN * took

    count, spent = most_within(seconds_of, 4.0, 1)
    whole = spent + always + each * count
    assert spent < 2.0
    assert 3.2 < whole <= 4.0 + each


@pytest.mark.parametrize("first", [1, 3, 10])
@pytest.mark.parametrize(("flat", "each"), [(0.5, 0.019), (0.6, 0.0006), (0.9, 0.015)])
def test_a_bend_in_the_time_is_not_taken_for_its_slope(flat, each, first):
    """A GPU fills up gradually: at the bend a few more particles take less than each of many."""

    def seconds_of(count):
        took = (flat**3 + (each * count) ** 3) ** (1 / 3)
        return took, SHOWN * took

    count, spent = most_within(seconds_of, 4.0, first)
    assert 3.2 < spent + seconds_of(count)[0] < 4.1


def test_a_slow_start_is_not_taken_for_the_whole_run(monkeypatch):
    """A device loads kernels in the first steps."""
    clock, calls = [0.0], [0]

    def network(x, t):
        calls[0] += 1
        clock[0] += 0.05 if calls[0] > 4 else 0.5
        return torch.zeros(*x.shape, 3)

    model = ts.Diffusion(ts.from_logits(network, 2), ts.Ancestral(2), ts.uniform_steps(50), ts.template(4, 2))
    method = ts.Method(ts.Steering(model), when=ts.triggers.never)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    calls[0] = 0
    predicted, _ = predicted_seconds(method, 4, 2, torch.Generator().manual_seed(0))
    assert predicted == pytest.approx(50 * 0.05, rel=0.3)


def test_seconds_of_a_run_are_predicted_by_its_first_steps(monkeypatch):
    """A network whose time is known: a twentieth of a second for each call, and one call for each step."""
    clock, calls = [0.0], [0]

    def network(x, t):
        calls[0] += 1
        clock[0] += 0.05
        return torch.zeros(*x.shape, 3)

    model = ts.Diffusion(ts.from_logits(network, 2), ts.Ancestral(2), ts.uniform_steps(20), ts.template(4, 2))
    method = ts.Method(ts.Steering(model), when=ts.triggers.never)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    method(4, 2, generator=torch.Generator().manual_seed(0))  # the first run also checks the network
    before = clock[0]
    method(4, 2, generator=torch.Generator().manual_seed(0))
    whole, after, called = clock[0] - before, clock[0], calls[0]
    predicted, spent = predicted_seconds(method, 4, 2, torch.Generator().manual_seed(0))
    assert predicted == pytest.approx(whole, rel=0.06)
    assert spent == pytest.approx(clock[0] - after)
    assert calls[0] - called <= 7


def test_most_of_a_short_time_is_left_for_the_run(monkeypatch):
    """A network that takes a quarter of the time for one particle and little more for a hundred, as on a GPU."""
    clock = [0.0]

    def network(x, t):
        clock[0] += 0.015 + 1e-5 * len(x)
        return torch.zeros(*x.shape, 3)

    denoiser = ts.from_logits(network, 2)
    model = ts.Diffusion(denoiser, ts.Ancestral(2), ts.uniform_steps(64), ts.template(16, 2), sharing=False)
    path = ts.Steering(model, ts.Tilt(lambda x: (x == 0).sum(-1).float(), 1.0))
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    began = clock[0]
    plan = ts.plan(path, "4s", populations=8, particles=(8,), generator=torch.Generator().manual_seed(0))
    planned = clock[0]
    plan.run(generator=torch.Generator().manual_seed(1))
    assert plan.cost == pytest.approx(clock[0] - planned, rel=0.1)
    assert plan.spent < 1.7
    assert plan.spent <= planned - began < plan.spent + 0.2  # checks of the network come once, before
    assert plan.num_particles > 100


def test_templates_are_planned_together():
    """Equally many populations of each, and a scatter that does not count how their normalisers differ."""
    template = torch.full((2, TOY.length), TOY.mask_id)
    template[1, 0] = 1
    path = steering()
    path = replace(path, model=replace(untyped(path.model), template=template))
    plan = ts.plan(path, 50_000, particles=(8,), draws=(1,), ramps=SAME, generator=torch.Generator().manual_seed(0))
    assert plan.populations % 2 == 0
    assert plan.winner.log_z.shape[0] == 2
    result = plan.run(generator=torch.Generator().manual_seed(1))
    assert plan.winner.scatter == pytest.approx(float(result.log_z.view(2, -1).std(-1).mean()), rel=0.5)
    apart = replace(plan.winner, log_z=torch.tensor([[0.0, 0.2], [5.0, 5.2]]), iid_spread=None)
    assert apart.scatter == pytest.approx(math.sqrt(0.02), rel=1e-4)
    assert apart.spread == pytest.approx(math.sqrt(math.expm1(0.02)), rel=1e-3)
