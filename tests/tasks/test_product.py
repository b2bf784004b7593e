"""The product of two densities against its exact answers."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from narrow import some
from product_toys import first_opening

import tokensteer as ts
from tokensteer.app.cli import main
from tokensteer.app.runs.recipes import METHODS
from tokensteer.tasks.common import grid
from tokensteer.tasks.common.metrics import tv, tv_floor
from tokensteer.tasks.common.task import Setup
from tokensteer.tasks.product import task as product
from tokensteer.testing import assert_denoiser, assert_reward


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_product_has_modes_that_neither_density_has():
    p1, p2, both = product.ring(), product.cross(), product.exact(Setup())
    for pmf in (p1, p2, both):
        assert float(pmf.sum()) == pytest.approx(1.0)
        assert float(pmf.min()) > 0
    torch.testing.assert_close(both, p1 * p2 / (p1 * p2).sum())
    quarters = [part for half in both.tensor_split(2, 0) for part in half.tensor_split(2, 1)]
    assert [round(float(part.sum()), 6) for part in quarters] == [0.25] * 4
    axes = both[30:34].sum() + both[:, 30:34].sum()  # between the modes
    assert float(axes) < 0.02
    assert min(float(p[30:34].sum() + p[:, 30:34].sum()) for p in (p1, p2)) > 0.1


def test_denoisers_and_reward_are_lawful():
    task = product.task(Setup(4))
    for model in some(task.guided)().models:
        assert_denoiser(model, one_hots=True)
    assert_reward(task.tilt.reward, grid.STATES + 1, 2, mask_id=grid.MASK, differentiable=True)


def opened(joint: torch.Tensor, apart: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Both sites open in the same of T equal steps with probability 1/T, and then have the mass `apart`."""
    mass = (1 - 1 / num_steps) * joint + apart / num_steps
    return mass / mass.sum()


def by_hand(num_steps: int, kl: float, a: float, b: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The targets of the tilt and of the product of models."""
    p1, p2 = product.ring(), product.cross()
    tilt = (p1 ** ((a - 1) / kl)) * p2 ** (b / kl)
    tilted = tilt * opened(p1, p1.sum(1, keepdim=True) * p1.sum(0), num_steps)
    a, b = 1 + (a - 1) / kl, b / kl
    one, other = (p1.sum(k) ** a * p2.sum(k) ** b for k in (1, 0))
    return tilted / tilted.sum(), opened(p1**a * p2**b, one.unsqueeze(-1) * other, num_steps)


@pytest.mark.parametrize(("kl", "powers"), [(1.0, (1.0, 1.0)), (2.0, (0.5, 2.0))])
def test_both_ways_have_their_targets(kl: float, powers: tuple[float, float]):
    """By enumeration, and by hand."""
    task = product.task(Setup(4, kl=kl), powers)
    steerings = (ts.Steering(task.model, task.tilt), ts.Steering(some(task.guided)()))
    for steering, expected in zip(steerings, by_hand(4, kl, *powers), strict=True):
        torch.testing.assert_close(grid.target(steering).pmf, expected)


def test_both_targets_approach_the_product_of_the_tables():
    wanted = product.exact(Setup())
    gaps = [[tv(pmf, wanted) for pmf in by_hand(num_steps, 1.0, 1.0, 1.0)] for num_steps in (25, 50, 100)]
    for one in zip(*gaps, strict=True):
        assert all(1.9 < large / small < 2.1 for large, small in pairwise(one))
        assert one[-1] < 0.01


def test_tilt_knows_log_z():
    task = product.task(Setup(10))
    steering = ts.Steering(task.model, task.tilt)
    both = (product.ring() * product.cross()).sum().log()
    exact = grid.target(steering).log_z
    assert exact == pytest.approx(float(both), abs=0.1)
    z = (ts.smc_base(task.model, task.tilt)(100, 32, generator=seeded()).log_z - exact).exp()
    assert abs(float((z.mean() - 1) / (z.std() / math.sqrt(32)))) < 4


def test_weights_mend_guidance():
    """With 50 steps the O(1/T) of the target, 0.02, is small beside the floor of 1,000 draws, 0.36."""
    task, wanted = product.task(Setup(50)), product.exact(Setup())
    floor, found = tv_floor(wanted.flatten(), 1000), {}
    for name in ("cfg", "smc-cfg", "smc-base", "smc-grad"):
        recipe = METHODS[name]
        result = recipe.answer(recipe.make(task, task.tilt, 1000)(1000, 4, generator=seeded()))
        pmfs = [grid.histogram(x, w) for x, w in zip(result.samples, result.weights, strict=True)]
        found[name] = sum(tv(pmf, wanted) for pmf in pmfs) / len(pmfs)
    assert found["smc-cfg"] < 1.3 * floor < found["cfg"], (found, floor)
    assert max(found["smc-base"], found["smc-grad"]) < 1.35 * floor, (found, floor)


def test_weights_are_uneven_since_the_first_site_does_not_know_the_other():
    """ESS/N without resampling is that of its first opening, in as many steps as one likes: with T of them a share of
    1/T opens both sites at once."""
    expected, found = first_opening(product.ring(), product.cross()), {}
    for num_steps in (10, 100):
        path = ts.Steering(some(product.task(Setup(num_steps)).guided)(), None, ts.Guided())
        result = ts.smc(path, 4000, 4, when=ts.triggers.never, generator=seeded())
        found[num_steps] = float(result.ess[-1].mean()) / 4000
    assert found[100] == pytest.approx(expected, abs=0.02)
    assert expected < found[100] < found[10] < 0.62


def test_metrics_have_floors_beside_them(tmp_path: Path):
    pytest.importorskip("ot")
    task = product.task(Setup(5))
    result = METHODS["smc-cfg"].make(task, task.tilt, 50)(50, 2, generator=seeded())
    found = task.metrics(result)
    assert list(found) == ["emd", "emd floor", "tv", "tv floor", "reward", "exact log_z", "ess"]
    assert found["tv floor"].mean == pytest.approx(tv_floor(product.exact(Setup()).flatten(), 50))
    assert 0 < found["emd floor"].mean < found["emd"].mean + 5 * found["emd"].error
    some(task.picture)(result.sample(20).flatten(0, 1), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--goal", "3"], "product has a single goal: leave out --goal 3"),
        (["--method", "smc-cfg", "--guidance", "2"], "the powers of product are 1 and 1/kl: give --kl"),
        (["--method", "smc-amot"], "nothing was trained for product"),
    ],
)
def test_what_it_has_not_is_refused(words: list[str], says: str, tmp_path: Path, capsys):
    assert main(["run", "product", *words, "--steps", "2", "--out", str(tmp_path / "x")]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_run_is_reported_beside_the_exact_product(tmp_path: Path):
    pytest.importorskip("ot")
    folder = tmp_path / "run"
    words = "--methods cfg smc-cfg smc-base --particles 20 --populations 2 --steps 4 --match-rows smc-cfg"
    assert main(["compare", "product", *words.split(), "--out", str(folder)]) == 0
    rows = ts.open_run(folder).rows
    assert [row["job"]["method"] for row in rows] == ["cfg", "smc-cfg", "smc-base"]
    assert rows[0]["particles"] == rows[1]["particles"] == 20
    assert main(["report", str(folder)]) == 0
    assert "exact target" in (folder / "report.html").read_text()
