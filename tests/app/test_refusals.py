"""Errors of a user's code are reported with their file and line, and sizes that cannot fit are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_texts

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
