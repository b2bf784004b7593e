"""Several runs as one: Z is the mean over all particles, with an error over the populations of all runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import answer
from narrow import untyped
from toys import Toy, seeded

import tokensteer as ts
from tokensteer.core.particles.result import pooled

B = Toy("B")
STEERING = ts.Steering(B.model("mdm"), ts.Tilt(B.reward, B.kl))
TRUTH = answer(STEERING.model, STEERING.twist)


def run(seed: int, particles: int = 4, populations: int = 3, **options: Any) -> ts.Result:
    return ts.smc(options.pop("path", STEERING), particles, populations, generator=seeded(seed), **options)


def test_equal_runs_are_as_one_run_of_all_populations() -> None:
    parts = [run(seed) for seed in range(4)]
    one = ts.Result.merge(parts)
    log_z = torch.cat([part.log_z for part in parts])
    assert one.samples.shape == (1, 48, B.length)
    assert one.pooled_log_z == pytest.approx(pooled(log_z))
    assert one.pooled_log_z[1] == pytest.approx(float((log_z - log_z.exp().mean().log()).exp().std()) / math.sqrt(12))
    assert one.scatter == pytest.approx(float(log_z.std()))
    assert one.rows == {name: sum(part.rows[name] for part in parts) for name in parts[0].rows}
    assert "pooled from 12 populations" in repr(one)
    assert "nan" not in repr(one)
    assert "nan" not in one.html()


def test_unequal_runs_count_by_their_particles() -> None:
    small, large = run(0, 2, 5), run(1, 16, 2)
    one = ts.Result.merge([small, large])
    z = (10 * small.log_z.exp().mean() + 32 * large.log_z.exp().mean()) / 42
    assert float(one.log_z.exp()) == pytest.approx(float(z))
    assert one.pooled_log_z[0] == pytest.approx(float(one.log_z))
    assert one.pooled_from is not None
    assert one.pooled_from.tolist() == [2] * 5 + [16] * 2
    assert torch.equal(one.log_w, torch.cat([small.log_w.flatten(), large.log_w.flatten()]).unsqueeze(0))
    assert torch.equal(some_lines(one)[:, :10] // 2, torch.arange(5).repeat_interleave(2).expand(len(one.ess), -1))
    assert ((some_lines(one)[:, 10:] - 10) // 16 == torch.arange(2).repeat_interleave(16)).all()


def some_lines(result: ts.Result) -> torch.Tensor:
    return result.lineages()[:, 0]


def test_the_error_of_unequal_runs_is_that_over_many_merges() -> None:
    """Squared errors against enumeration are, on average, the squares of the errors that are given."""
    merges, sizes = 1500, torch.tensor([2, 2, 4, 8, 16])
    log_z = torch.stack([run(k, int(size), merges).log_z for k, size in enumerate(sizes)], -1) - TRUTH.log_z
    found = [pooled(each, sizes) for each in log_z]
    off = torch.tensor([math.exp(mean) - 1.0 for mean, _ in found])
    told = torch.tensor([(error * math.exp(mean)) ** 2 for mean, error in found])
    assert abs(float(off.mean() / off.std())) * math.sqrt(merges) < 4
    difference = off.square() - told
    assert abs(float(difference.mean() / difference.std())) * math.sqrt(merges) < 4


def test_draws_of_merged_runs_are_from_the_target() -> None:
    """Z·pi(x_0) of every sequence, with populations of 2 and 8 particles in one result."""
    parts = [run(0, 2, 2000), run(1, 8, 1000)]
    one = ts.Result.merge(parts)
    found = TRUTH.masses(one.samples, one.weights * (one.log_z - TRUTH.log_z).exp())[0]
    variance = torch.zeros_like(found)
    for part in parts:
        share = part.log_w.numel() / one.log_w.numel()
        masses = TRUTH.masses(part.samples, (part.log_w - TRUTH.log_z).exp() / part.log_w.shape[1])
        variance += share**2 * masses.var(0) / len(masses)
    heavy = TRUTH.target > 1e-3
    assert float(((found - TRUTH.target)[heavy] / variance[heavy].sqrt()).abs().max()) < 4.5
    drawn = one.draw(4000, seeded())
    shares = TRUTH.masses(one.pick(drawn), torch.full(drawn.shape, 1 / 4000, dtype=torch.float64))[0]
    expected = TRUTH.masses(one.samples, one.weights)[0]
    assert float((shares - expected).abs().max()) < 4.5 * math.sqrt(0.25 / 4000)


def test_islands_of_runs_merge_too() -> None:
    """Islands that exchange are one population, and the error is over populations."""
    islands: dict[str, Any] = {"resample": ts.resampling.islands(4), "when": ts.triggers.always}
    one = ts.Result.merge([run(seed, 16, 300, **islands) for seed in range(2)])
    mean, error = one.pooled_log_z
    assert abs(mean - TRUTH.log_z) < 4 * error
    assert one.pooled_from is not None
    assert len(one.pooled_from) == 600


def test_merges_are_merged() -> None:
    parts = [run(0), run(1, 8, 2), run(2, 2, 1)]
    at_once = ts.Result.merge(parts)
    in_turn = ts.Result.merge([ts.Result.merge(parts[:2]), parts[2]])
    for name, value in vars(at_once).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.nan_to_num(), getattr(in_turn, name).nan_to_num()), name
    assert at_once.rows == in_turn.rows


def test_one_population_alone_stays_as_it_is() -> None:
    alone = run(0, populations=1, keep_states=True)
    assert alone.pooled() is alone


def test_a_merged_result_is_saved_and_opened(tmp_path: Path) -> None:
    one = ts.Result.merge([run(0, 2, 5), run(1, 16, 2)])
    one.save(tmp_path / "x.safetensors")
    again = ts.Result.load(tmp_path / "x.safetensors")
    assert again.pooled_log_z == one.pooled_log_z
    assert again.scatter == one.scatter
    assert (repr(again), again.html()) == (repr(one), one.html())


@pytest.mark.parametrize("sizes", [[2.0, 40.0], [2, 41], [42, 0], [[42]]])
def test_damaged_sizes_are_refused(sizes: Any, tmp_path: Path) -> None:
    one = ts.Result.merge([run(0, 2, 5), run(1, 16, 2)])
    replace(one, pooled_from=torch.tensor(sizes)).save(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="damaged Result: its pooled_from"):
        ts.Result.load(tmp_path / "x.safetensors")


def test_templates_stay_apart() -> None:
    template = torch.full((2, B.length), B.mask_id)
    template[1, 0] = 1
    path = ts.Steering(replace(B.model("mdm").base, template=template), ts.Tilt(B.reward, B.kl))
    parts = [run(0, 4, 6, path=path), run(1, 8, 2, path=path)]
    one = ts.Result.merge(parts)
    assert one.samples.shape == (2, 20, B.length)
    assert (one.samples[1, :, 0] == 1).all()
    for row in range(2):
        z = 12 * parts[0].log_z[3 * row : 3 * row + 3].exp().mean() + 8 * parts[1].log_z[row].exp()
        assert float(one.log_z[row].exp()) == pytest.approx(float(z / 20))


REFUSED: dict[str, tuple[list[Any], str]] = {
    "nothing": ([], "got no result"),
    "no result": ([run(0), 3], "number 1 is a int"),
    "another length of time": (
        [run(0), run(1, path=replace(STEERING, model=replace(B.model("mdm").base, steps=ts.uniform_steps(2))))],
        "runs of one target, and got .* in 2 steps",
    ),
    "no reward": ([run(0), run(1, path=ts.Steering(B.model("mdm")))], "without rewards: merge each group alone"),
    "the same seed": ([run(0, 16), run(1, 16), run(0, 16)], "the same run twice, numbers 0 and 2"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_merged_is_refused(what: str) -> None:
    results, says = REFUSED[what]
    with pytest.raises((ValueError, TypeError), match=says):
        ts.Result.merge(untyped(results))
