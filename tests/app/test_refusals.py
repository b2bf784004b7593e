"""Errors of a user's code are reported with their file and line, and sizes that cannot fit are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_cifar
import small_texts
import torch

import tokensteer as ts
from tokensteer.app import cli
from tokensteer.app.runs import prepare, runner, sizes
from tokensteer.app.runs.jobs import Job
from tokensteer.app.runs.units import Unit
from tokensteer.tasks.common.settings import Settings

MINE = """
import torch

def far(x):
    return torch.zeros(3)[x + 100]

def reward(x):
    return far(x)

def failing():
    raise KeyError("nothing")
"""


def tokensteer(*words: object) -> int:
    return cli.main([str(word) for word in words])


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("mine.py:reward", "under the law of the reward: IndexError at mine.py:5: index 10"),
        ("mine_too:reward", "under the law of the reward: IndexError at mine_too.py:5: index 10"),
        ("mine.py:failing", "mine.py:failing() breaks down: KeyError at mine.py:11: 'nothing'"),
        ("broken.py:reward", "broken.py cannot be imported: ZeroDivisionError at broken.py:2: division by zero"),
        ("absent:reward", "absent cannot be imported: ModuleNotFoundError: No module named 'absent'"),
    ],
)
def test_errors_of_a_users_code_have_its_line(target: str, says: str, tmp_path: Path, monkeypatch, capsys):
    for name, text in (("mine", MINE), ("mine_too", MINE), ("broken", "x = 1\ny = 1 / 0\n")):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert tokensteer("check", target, "--vocab", "4", "--length", "2") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert says in said


@pytest.mark.parametrize(
    ("task", "particles", "says"),
    [
        ("digits", 10**8, "100,000,000 particles x 3 populations x 64 sites x 3 tokens; use at most "),
        ("text", 10**7, "10,000,000 particles x 45 populations x 24 sites x 16 hidden units; use at most "),
    ],
)
def test_a_size_that_cannot_fit_is_refused(task: str, particles: int, says: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "run_one", None)
    monkeypatch.setattr(sizes, "physical_memory", lambda: 2**30)
    words = ["--method", "smc-base", "--populations", "3", "--steps", "2", "--out", tmp_path / "x"]
    words += ["--weights", small_texts.write_task(tmp_path / "weights")] if task == "text" else []
    assert tokensteer("run", task, "--particles", particles, *words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "smc-base needs at least " in said
    assert "and cpu has 1 GiB" in said
    assert says in said
    assert not (tmp_path / "x").exists()


def test_the_number_that_is_offered_fits(monkeypatch):
    monkeypatch.setattr(sizes, "physical_memory", lambda: 2**30)
    place = prepare.Environment()

    def check(particles: int) -> None:
        (ready,) = prepare.prepare([Job("digits", "smc-base", particles, 3, settings=Settings(steps=2))], place)
        sizes.check_fits(ready, place, Unit(0, ready.job))

    most = 2**30 // (3 * (64 * 3 * 4 + 2 * 64 * 8 + 2 * 8))
    check(most)
    with pytest.raises(ValueError, match=f"use at most {most:,} --particles"):
        check(most + 1)


# ---- options of a reward, and groups of pictures


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_cifar.save(tmp_path_factory.mktemp("weights"))


def prepared(weights: Path, *names: str, task: str = "cifar", **settings) -> list[prepare.PreparedJob]:
    jobs = [Job(task, name, 2, 1, settings=Settings(2, **settings)) for name in names]
    return prepare.prepare(jobs, prepare.Environment(weights))


@pytest.mark.parametrize(
    ("name", "value"), [("kl", 1e-4), ("draws", 3), ("ramp", "linear"), ("noise", "fresh"), ("smoothing", 0.5)]
)
def test_settings_of_a_reward_are_refused_where_it_is_not_used(name: str, value, weights: Path):
    """smc-cfg, the default of cifar, has no reward unless one is chosen; in a comparison one that uses it is enough."""
    for method in ("smc-cfg", "cfg"):
        with pytest.raises(
            ValueError, match=f"--{name} is that of the reward, which {method} does not use here: give --reward"
        ):
            prepared(weights, method, **{name: value})
    for names, more in ((("smc-cfg",), {"reward": "class"}), (("smc-base",), {}), (("smc-cfg", "smc-base"), {})):
        assert len(prepared(weights, *names, **{name: value}, **more)) == len(names)


def test_the_powers_of_product_are_set_by_kl_alone(weights: Path):
    (ready,) = prepared(weights, "smc-cfg", task="product", kl=0.5)
    assert isinstance(ready.method.steering.model, ts.Product)
    assert ready.method.steering.model.powers == (1.0, 2.0)
    assert prepared(weights, "pretrained", task="product", kl=0.5)  # its samples are measured against that target
    with pytest.raises(ValueError, match="which cfg, pretrained does not use here: leave it out"):
        prepared(weights, "cfg", "pretrained", task="product", draws=3)


@pytest.mark.parametrize(("populations", "share"), [(30, 20), (2, 20), (20, 20), (1, 10)])
def test_a_picture_has_equally_many_draws_of_each_group(populations: int, share: int, weights: Path):
    """Of 300 draws of ten classes the first 200 were shown, in lines of 20, most of which mixed two classes."""
    job = Job("cifar", "pretrained", 10, populations, settings=Settings(2))
    (ready,) = prepare.prepare([job], prepare.Environment(weights))
    samples = torch.arange(10).repeat_interleave(populations)[:, None, None].expand(-1, 10, 5).contiguous()
    nothing = torch.zeros(10 * populations, 10)
    result = ts.Result(samples, nothing, None, nothing.T[:1], None, nothing.long()[None], {}, templates=10)
    shown = runner._pictured(ready, result)
    assert shown[:, 0].tolist() == torch.arange(10).repeat_interleave(share).tolist()
