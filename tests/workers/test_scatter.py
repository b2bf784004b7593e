"""Units: the same results in any order, from any worker, and after any interruption. Ray is not needed here."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toys

import tokensteer as ts
from tokensteer.workers import pool as pools
from tokensteer.workers import units
from tokensteer.workers.pool import ThisProcess, Workers

TOY = toys.Toy(next(iter(toys.GOLDEN["toys"])))
NAMES = [f"unit {k}" for k in range(5)]


def make_steering() -> ts.Steering:
    return ts.Steering(TOY.model("mdm"), TOY.tilt("mdm"))


def same(first: dict[str, ts.Result], second: dict[str, ts.Result]) -> bool:
    """Whether samples and weights are equal bit for bit."""
    return list(first) == list(second) and all(
        torch.equal(one.samples, second[name].samples) and torch.equal(one.log_w, second[name].log_w)
        for name, one in first.items()
    )


@pytest.fixture
def shuffled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls are done in a random order; the list has those that were done."""
    rng, done = random.Random(0), list[Any]()

    def finished(pool: ThisProcess) -> Iterator[tuple[Any, Any]]:
        while pool.waiting:
            call = pool.waiting[rng.randrange(len(pool.waiting))]
            pool.waiting.remove(call)
            done.append(call)
            yield call, pool.worker(call)

    monkeypatch.setattr(ThisProcess, "finished", finished)
    return done


# ---- seeds and names


def test_seeds_are_made_from_the_seed_of_the_run_and_the_name() -> None:
    assert units.seed_of(0, "a") == units.seed_of(0, "a")
    assert len({units.seed_of(seed, name) for seed in range(20) for name in "abcde"}) == 100
    assert units.seed_of(0, "prompt-1/island-2") == 1456949961  # stored runs depend on it


def test_units_with_the_same_name_or_seed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="two units are called 'a'"):
        units.seeds_of(0, ["a", "b", "a"])
    monkeypatch.setattr(units, "seed_of", lambda seed, name: 7)
    with pytest.raises(ValueError, match=r"'a' and 'b' have the same seed.*choose another seed than 3"):
        units.seeds_of(3, ["a", "b"])


def test_seeds_fit_what_a_generator_reads() -> None:
    """torch reads 32 bits of a seed on a CPU: two seeds that differ above would be one."""
    draw = lambda seed: torch.rand(2, generator=torch.Generator().manual_seed(seed))  # noqa: E731
    assert torch.equal(draw(5), draw(5 + units.SEEDS))
    assert all(0 <= units.seed_of(0, str(k)) < units.SEEDS for k in range(100))


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a/b", "...", "ü" * 300, "nul\0", "a" * 500])
def test_files_of_units_stay_in_their_folder(name: str) -> None:
    file = units.file_name(name)
    assert not set(file) & set("/\\\0")
    assert not file.startswith(".")
    assert len(file) < 120
    assert file != units.file_name(name + "x")
    assert units.file_name("digits-n16-s0") == "digits-n16-s0"


# ---- scatter


def test_results_do_not_depend_on_the_order(shuffled: list[Any]) -> None:
    first = ts.scatter(make_steering, NAMES, 8, 2)
    order = [call.name for call in shuffled]
    shuffled.clear()
    second = ts.scatter(make_steering, NAMES[::-1], 8, 2)
    assert [call.name for call in shuffled] != order
    assert list(second) == NAMES[::-1]
    assert same(first, {name: second[name] for name in NAMES})
    assert not torch.equal(first["unit 0"].samples, first["unit 1"].samples)
    assert not torch.equal(first["unit 0"].samples, ts.scatter(make_steering, NAMES, 8, 2, seed=1)["unit 0"].samples)


def test_a_unit_is_an_ordinary_run() -> None:
    (result,) = ts.scatter(make_steering, ["a"], 8, 3, seed=4).values()
    generator = torch.Generator().manual_seed(units.seed_of(4, "a"))
    alone = ts.smc(make_steering(), 8, 3, generator=generator)
    assert torch.equal(result.samples, alone.samples)
    assert torch.equal(result.log_w, alone.log_w)
    assert dict(result.rows) == dict(alone.rows)


def test_units_may_stand_for_values() -> None:
    """make_steering() is called once, and what it returns once for each unit."""
    made: list[str] = []

    def make() -> Any:
        made.append("networks")

        def steer(kl: float) -> ts.Method:
            made.append(str(kl))
            return ts.smc_base(TOY.model("mdm"), replace(TOY.tilt("mdm"), kl=kl))

        return steer

    found = ts.scatter(make, {"soft": 2.0, "hard": 0.5}, 8, 2)
    assert made == ["networks", "2.0", "0.5"]
    assert list(found) == ["soft", "hard"]


def test_a_folder_is_gone_on_with(tmp_path: Path) -> None:
    calls: list[int] = []

    def counting() -> Any:
        steering = make_steering()

        def steer(name: str) -> ts.Steering:
            if len(calls) == 2:
                raise FloatingPointError("out of luck")
            calls.append(1)
            return steering

        return steer

    with pytest.raises(FloatingPointError, match="out of luck") as raised:
        ts.scatter(counting, NAMES, 8, 2, folder=tmp_path / "x")
    assert "in the unit 'unit 2'" in raised.value.__notes__
    assert len(list((tmp_path / "x").glob("*.safetensors"))) == 2
    whole = ts.scatter(make_steering, NAMES, 8, 2)
    calls.clear()
    calls.append(1)  # one unit less may be run
    (last := tmp_path / "x" / f"{units.file_name('unit 1')}.safetensors").write_bytes(b"damaged")
    with pytest.raises(FloatingPointError):
        ts.scatter(counting, NAMES, 8, 2, folder=tmp_path / "x")
    assert last.stat().st_size > 100  # run again
    assert same(ts.scatter(make_steering, NAMES, 8, 2, folder=tmp_path / "x"), whole)
    assert same(ts.scatter(lambda: pytest.fail("it ran"), NAMES, 8, 2, folder=tmp_path / "x"), whole)
    assert len(ts.scatter(make_steering, [*NAMES, "more"], 8, 2, folder=tmp_path / "x")) == 6


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    ts.scatter(make_steering, ["a"], 8, folder=tmp_path / "x")
    with pytest.raises(ValueError, match=r"has units of other settings.*use another folder"):
        ts.scatter(make_steering, ["a"], 9, folder=tmp_path / "x")
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(ValueError, match=r"is not empty and has no scatter\.json"):
        ts.scatter(make_steering, ["a"], 8, folder=tmp_path)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"units": "abc"}, TypeError, "units must be a list of names"),
        ({"units": [0, 1]}, TypeError, "the name of a unit must be a text, got 0"),
        ({"units": ["a", "a"]}, ValueError, "two units are called 'a'"),
        ({"make_steering": 3}, TypeError, "make_steering must be a function"),
        ({"make_steering": lambda: 3}, TypeError, "must return a Steering.*it gave int"),
        ({"make_steering": lambda: lambda unit: 3}, TypeError, "must return a Steering.*it gave int"),
        ({"workers": 0}, ValueError, "workers must be at least 1"),
        ({"gpus_per_worker": 1.0}, ValueError, "gpus_per_worker is for several workers"),
        ({"seed": -1}, ValueError, "seed must be a number from 0"),
        ({"num_particles": 0}, ValueError, "num_particles must be at least 1"),
    ],
)
def test_mistakes_are_named(given: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        ts.scatter(**{"make_steering": make_steering, "units": ["a"], **given})


def test_several_workers_need_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "find_spec", lambda name: None)
    for count, ray in ((2, None), (None, "auto")):
        with pytest.raises(ImportError, match=r"need Ray: pip install 'tokensteer\[ray\]'"):
            Workers(count, ray)
    assert not Workers(1).remote
