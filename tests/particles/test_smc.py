"""The loop and its result: budget, reproducibility, bookkeeping, round trips; and schedules and ramps."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from checks import answer, judge
from narrow import some
from toys import Toy

import tokensteer as ts
from tokensteer.core.particles.result import pooled


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass
class Counted:
    """A denoiser that notes when it is called, on how many rows, and whether gradients were on."""

    inner: ts.Denoiser
    times: list[float] = field(default_factory=list)
    rows: int = 0
    gradients: list[bool] = field(default_factory=list)

    def __call__(self, x: torch.Tensor, t: float) -> torch.Tensor:
        self.times.append(t)
        self.rows += len(x)
        self.gradients.append(torch.is_grad_enabled())
        return self.inner(x, t)


def counted_run(sampler: str, proposal: ts.Proposal, **options) -> tuple[Counted, ts.Result]:
    toy = Toy("B")
    plain = toy.model(sampler)
    counter = Counted(plain.denoiser)
    steering = ts.Steering(replace(plain, denoiser=counter), ts.Tilt(toy.reward, toy.kl, **options), proposal)
    counter.times.clear()
    counter.gradients.clear()
    counter.rows = 0
    return counter, ts.smc(steering, 8, 3, when=ts.triggers.always, generator=seeded())


@pytest.mark.parametrize("sampler", ["mdm", "remdm", "lowconf"])
@pytest.mark.parametrize("proposal", [ts.FromModel(), ts.Gradient(), Toy("B").amortised()])
def test_one_denoiser_call_a_step_and_none_at_the_end(sampler: str, proposal: ts.Proposal) -> None:
    counter, result = counted_run(sampler, proposal, draws=2)
    num_steps = Toy("B").num_steps(sampler)
    assert counter.times == [step.t for step in ts.uniform_steps(num_steps)]
    assert counter.rows == result.rows["denoiser"]
    assert result.rows["denoiser"] + result.saved.get("denoiser", 0) == 8 * 3 * num_steps
    assert all(on == proposal.needs_gradient for on in counter.gradients)
    # Two draws a step where the ramp is not zero (or a gradient is wanted), and the final reward once.
    looks = num_steps if proposal.needs_gradient else num_steps - 1
    assert result.rows["reward"] == 8 * 3 * (2 * looks + 1)


def test_only_finished_samples_cost_rewards_when_the_ramp_says_so() -> None:
    _, result = counted_run("mdm", ts.FromModel(), ramp=ts.ramps.end)
    assert result.rows["reward"] == 8 * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sampler", ["mdm", "remdm", "lowconf"])
def test_same_seed_same_samples(sampler: str, dtype: torch.dtype) -> None:
    toy = Toy("B", dtype)
    for proposal in (ts.FromModel(), ts.Gradient(), ts.Enumerated()):
        tilt = toy.tilt(sampler) if isinstance(proposal, ts.Enumerated) else ts.Tilt(toy.reward, toy.kl, draws=2)
        steering = ts.Steering(toy.model(sampler), tilt, proposal)
        torch.manual_seed(1)
        first = ts.smc(steering, 8, 4, generator=seeded(5))
        torch.manual_seed(2)  # the global seed plays no part
        again = ts.smc(steering, 8, 4, generator=seeded(5))
        other = ts.smc(steering, 8, 4, generator=seeded(6))
        assert torch.equal(first.samples, again.samples)
        assert torch.equal(first.log_w, again.log_w)
        assert torch.equal(first.sample(3), again.sample(3))
        assert not torch.equal(first.samples, other.samples)


def test_result_keeps_what_a_person_needs(tmp_path: Path) -> None:
    toy = Toy("B")
    result = ts.smc_grad(toy.model("mdm"), toy.tilt("mdm"))(16, 5, generator=seeded())
    assert result.samples.shape == (5, 16, 3)
    assert result.ess.shape == (5, 5)
    assert result.ancestors.shape == (5, 5, 16)
    assert result.mean_reward is not None
    assert result.mean_reward.shape == (5, 5)
    assert torch.allclose(result.weights.sum(-1), torch.ones(5, dtype=torch.float64))
    reward = toy.reward(result.samples.flatten(0, 1)).view(5, 16)
    assert torch.equal(some(result.reward), reward)
    assert torch.equal(toy.reward(result.best()), reward.amax(-1))
    pooled, error = result.pooled_log_z
    assert pooled == pytest.approx(float(result.log_z.exp().mean().log()))
    assert error > 0
    assert len(repr(result).splitlines()) == 5
    file = tmp_path / "result.safetensors"
    result.save(file)
    back = ts.Result.load(file)
    assert torch.equal(back.samples, result.samples)
    assert torch.equal(back.log_w, result.log_w)
    assert torch.equal(back.ancestors, result.ancestors)
    assert back.rows == result.rows
    assert repr(back) == repr(result)


def test_load_refuses_another_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weights": torch.zeros(2)}, str(tmp_path / "other.safetensors"))
    with pytest.raises(ValueError, match=r"no saved Result.*lacks"):
        ts.Result.load(tmp_path / "other.safetensors")


def test_lineages_follow_the_ancestors() -> None:
    toy = Toy("B")
    records = list(
        ts.sweep(ts.Steering(toy.model("mdm"), toy.tilt("mdm")), 8, 2, when=ts.triggers.always, generator=seeded())
    )
    result = ts.smc(ts.Steering(toy.model("mdm"), toy.tilt("mdm")), 8, 2, when=ts.triggers.always, generator=seeded())
    lines = result.lineages()
    assert torch.equal(lines[-1], torch.arange(8).expand(2, 8))
    for i in range(len(records) - 1):
        assert torch.equal(records[i + 1].ancestors.gather(1, lines[i + 1]), lines[i])
        # What is open stays open along a lineage of the ancestral kernel.
        x, y = (r.x.gather(1, lines[i + k].unsqueeze(-1).expand_as(r.x)) for k, r in enumerate(records[i : i + 2]))
        assert ((x == y) | (x == toy.mask_id)).all()


def test_progress_shows_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    toy = Toy("A")
    ts.smc(ts.Steering(toy.model("mdm"), toy.tilt("mdm")), 4, progress=True, generator=seeded())
    assert "ESS/N" in capsys.readouterr().out
    ts.smc(ts.Steering(toy.model("mdm"), toy.tilt("mdm")), 4, generator=seeded())
    assert capsys.readouterr().out == ""


def test_normalisers_of_different_prompts_are_not_pooled(tmp_path: Path) -> None:
    toy = Toy("C")
    prompts = torch.stack([ts.template(4, 4, [2], at=[1]), ts.template(4, 4, [0, 3], at=[0, 3])])
    steering = ts.Steering(replace(toy.model("mdm"), template=prompts), ts.Tilt(toy.reward, toy.kl))
    result = ts.smc(steering, 16, 6, generator=seeded())
    assert (result.samples[:3, :, 1] == 2).all()
    assert (result.samples[3:, :, 0] == 0).all()
    result.save(tmp_path / "result.safetensors")
    again = ts.Result.load(tmp_path / "result.safetensors")
    for shown in (repr(result), repr(again)):
        line = next(line for line in shown.splitlines() if "log Z" in line)
        values = [f"{value:.4f} ± {error:.4f}" for value, error in map(pooled, (result.log_z[:3], result.log_z[3:]))]
        assert line.split(maxsplit=2)[2] == ", ".join(values) + f"; one population ± {result.scatter:.2f}"
    dead = replace(result, log_w=result.log_w.index_fill(0, torch.tensor([1]), -math.inf))
    lives = [0, 2, 3, 4, 5]
    mean = float((result.weights * some(result.reward)).sum(-1)[lives].mean())
    assert f"{mean:.4f} weighted mean" in repr(dead)


def test_posterior_draws_follow_the_weights() -> None:
    log_w = torch.tensor([[0.1, 0.2, 0.7]], dtype=torch.float64).log()
    result = ts.Result(
        samples=torch.tensor([[[0], [1], [2]]]),
        log_w=log_w,
        reward=torch.tensor([[5.0, 0.0, 1.0]]),
        ess=torch.ones(1, 1),
        mean_reward=None,
        ancestors=torch.zeros(1, 1, 3, dtype=torch.long),
        rows={},
        generator=seeded(),
    )
    share = result.sample(20_000).flatten().bincount() / 20_000
    p = log_w.exp()[0]
    assert ((share - p) / (p * (1 - p) / 20_000).sqrt()).abs().max() < 4
    assert result.best().tolist() == [[0]]  # the best by reward is the least likely draw


@pytest.mark.parametrize("sampler", ["mdm", "remdm", "lowconf"])
def test_prompts_stay(sampler: str) -> None:
    toy = Toy("C")
    prompts = torch.stack([ts.template(4, 4, [2], at=[1]), ts.template(4, 4, [0, 3], at=[0, 3])])
    model = replace(toy.model(sampler), template=prompts)
    for proposal in (ts.FromModel(), ts.Gradient()):
        steering = ts.Steering(model, ts.Tilt(toy.reward, toy.kl), proposal)
        for record in ts.sweep(steering, 16, 2, when=ts.triggers.always, generator=seeded()):
            assert (record.x[0, :, 1] == 2).all()
            assert (record.x[1][:, [0, 3]] == torch.tensor([0, 3])).all()


@cache
def named_methods() -> dict[str, ts.Method]:
    toy = Toy("B")
    p1, p2 = toy.model("mdm"), toy.model("mdm", "p2")
    tilt = ts.Tilt(toy.reward, 2.0, draws=2)
    gentle = replace(tilt, kl=10.0)  # a sum of many rewards is steep
    return {
        "pretrained": ts.pretrained(p1),
        "best of n": ts.best_of_n(p1, tilt),
        "svdd": ts.svdd(p1, tilt),
        "nested svdd": ts.nested_svdd(p1, tilt),
        "fk max": ts.fk_steering(p1, tilt, ts.potentials.maximum, interval=2),
        "fk sum": ts.fk_steering(p1, gentle, ts.potentials.total),
        "smc base": ts.smc_base(p1, tilt),
        "smc grad": ts.smc_grad(p1, tilt),
        "prop grad": ts.prop_grad(p1, tilt),
        "smc amot": ts.smc_amot(p1, tilt, toy.amortised()),
        "prop amot": ts.prop_amot(p1, tilt, toy.amortised()),
        "product": ts.product((p1, p2), (1.5, -0.5)),
        "product and tilt": ts.product((p1, p2), (0.5, 0.5), tilt),
        "cfg": ts.smc_cfg(p1, p2, 1.5),
        "cfg and tilt": ts.smc_cfg(p1, p2, 1.5, tilt),
    }


@pytest.mark.parametrize("name", named_methods())
def test_named_methods_have_their_target(name: str) -> None:
    """log Z and the law of sequences, against enumeration of the target by the base proposal; and who resamples."""
    method = named_methods()[name]
    result = method(8, 2000, generator=seeded(3))
    outcome = judge(result.samples, result.log_w, answer(method.steering.model, method.steering.twist))
    assert outcome.unbiased, str(outcome)
    stays = (result.ancestors == torch.arange(8)).all()
    if name in ("pretrained", "best of n", "prop grad", "prop amot"):
        assert stays
    if name in ("svdd", "nested svdd", "fk max", "fk sum"):
        assert not stays
    one = (result.ancestors[1:, :, :4] == result.ancestors[1:, :, :1]).all()  # parent of four
    assert one == (name in ("svdd", "nested svdd"))


def test_pretrained_is_the_model_and_weighs_nothing() -> None:
    assert (named_methods()["pretrained"](8, generator=seeded()).log_w == 0).all()


def test_guidance_is_a_product_of_two() -> None:
    """p(x | c)^scale · p(x)^(1 - scale), the conditional model first."""
    cfg, product = (named_methods()[name].steering.model for name in ("cfg", "product"))
    for model in (cfg, product):
        assert isinstance(model, ts.Product)
        assert list(model.powers) == [1.5, -0.5]
        joints = [one.denoiser.joint for one in model.models]
        assert [torch.equal(joint, Toy("B").joint(name)) for joint, name in zip(joints, ("p1", "p2"), strict=True)] == [
            True
        ] * 2


SCHEDULES = [ts.Linear(), ts.Cosine(), ts.LogLinear(), ts.Geometric(), ts.Polynomial(3.0)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_fall_and_know_their_slope(schedule: ts.Schedule) -> None:
    times = [0.05 + 0.1 * i for i in range(10)]
    values = [schedule.alpha(t) for t in times]
    assert values == sorted(values, reverse=True)
    assert schedule.alpha(0.0) == pytest.approx(1.0, abs=1e-4)
    assert schedule.alpha(1.0) == pytest.approx(0.0, abs=2e-3)
    for t in times:
        slope = (schedule.alpha(t + 1e-6) - schedule.alpha(t - 1e-6)) / 2e-6
        assert schedule.derivative(t) == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [ts.uniform_steps, ts.cosine_steps])
def test_every_schedule_ends_clean(schedule: ts.Schedule, steps) -> None:
    toy = Toy("B")
    model = replace(toy.model("mdm"), kernel=ts.Ancestral(toy.mask_id, schedule, ts.Cap(0.2)), steps=steps(7))
    result = ts.pretrained(model)(64, generator=seeded())
    assert (result.samples != toy.mask_id).all()
    assert (result.log_w == 0).all()


def test_grids() -> None:
    for grid in (ts.uniform_steps(5), ts.cosine_steps(5)):
        assert [s.index for s in grid] == list(range(5))
        assert grid[0].t == 1.0
        assert grid[-1].s == 0.0
        assert all(a.s == b.t and a.t > a.s for a, b in itertools.pairwise(grid))
    assert ts.cosine_steps(4)[1].t == pytest.approx(math.cos(math.pi / 8))


def test_ramps() -> None:
    assert ts.ramps.linear(0.25) == 0.75
    assert ts.ramps.constant(1.0) == 1.0
    assert [ts.ramps.end(t) for t in (1.0, 0.01, 0.0)] == [0.0, 0.0, 1.0]
    mnist = ts.ramps.exponential(100, 1.05)
    assert mnist(1.0) == 0.0
    assert mnist(0.9) == pytest.approx(1.05**10 - 1)
    assert mnist(0.0) == 1.0
    assert [ts.ramps.clipped(5)(t) for t in (1.0, 0.75, 0.5, 0.0)] == [0.0, 0.5, 1.0, 1.0]


def test_on_step_sees_every_record_and_changes_nothing() -> None:
    steering = ts.Steering(Toy("B").model("mdm"), Toy("B").tilt("mdm"))
    seen: list[ts.Record] = []
    runs = [
        ts.smc(steering, 4, 2, generator=torch.Generator().manual_seed(0), on_step=on_step)
        for on_step in (None, seen.append)
    ]
    assert [record.step for record in seen] == [None, *steering.steps]
    assert torch.equal(runs[0].log_w, runs[1].log_w)
    assert torch.equal(seen[-1].log_w, runs[1].log_w)
    assert torch.equal(torch.stack([record.ancestors for record in seen]), runs[1].ancestors)


def test_an_error_in_on_step_restores_the_memory_limit() -> None:
    steering = ts.Steering(Toy("B").model("mdm"), Toy("B").tilt("mdm"))

    def fail(record: ts.Record) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ts.smc(steering, 4, generator=torch.Generator().manual_seed(0), memory="1kB", on_step=fail)
    assert {budget.memory for budget in steering.resources.budgets} == {None}
