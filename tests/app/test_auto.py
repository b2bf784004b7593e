"""The method auto: what pilots choose within a budget, and how it is written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tokensteer as ts
from tokensteer.app import cli

SMALL = ["--populations", "2", "--steps", "3"]


def tokensteer(*words: object) -> int:
    return cli.main([str(word) for word in words])


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("auto") / "run"
    assert tokensteer("run", "digits", "--budget", "8000", *SMALL, "--draws", "1", "--out", out) == 0
    return out


def test_the_budget_is_spent_on_what_pilots_choose(planned: Path):
    run = ts.open_run(planned)
    row = run.rows[0]
    assert row["method"] == "auto"
    assert set(row["plan"]) == {"trigger", "draws", "proposal", "ramp", "particles"}
    assert row["plan"]["draws"] == "1"  # given, so there is nothing to choose
    assert "gradient" in row["plan"]["proposal"]
    assert row["plan"]["particles"].startswith(f"{row['particles']},")
    assert row["particles"] > 8
    assert sum(row["rows"].values()) < 8000
    assert row["job"]["budget"] == "8000"
    assert run.result(0).samples.shape[:2] == (2, row["particles"])


def test_same_seed_same_choice_by_rows(planned: Path, tmp_path: Path):
    words = ["run", "digits", "--method", "auto", "--budget", "8000", *SMALL, "--draws", "1"]
    assert tokensteer(*words, "--out", tmp_path / "again") == 0
    one, other = (ts.open_run(folder) for folder in (planned, tmp_path / "again"))
    assert one.rows[0]["plan"] == other.rows[0]["plan"]
    assert one.result(0).samples.equal(other.result(0).samples)


def test_the_choice_is_told_and_reported(planned: Path, tmp_path: Path, capsys):
    words = ["run", "digits", "--budget", "3000", *SMALL, "--draws", "1", "--ramp", "constant", "--trigger", "every:2"]
    assert tokensteer(*words, "--out", tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert "auto, seed 0, chose" in said
    assert "  trigger   every:2\n" in said
    assert "  ramp      constant\n" in said
    assert tokensteer("report", tmp_path / "run") == 0


def test_methods_get_equal_time(tmp_path: Path):
    words = ["compare", "digits", "--methods", "auto", "smc-base", "--budget", "1s", *SMALL]
    assert tokensteer(*words, "--draws", "1", "--ramp", "linear", "--out", tmp_path / "run") == 0
    auto, base = ts.open_run(tmp_path / "run").rows
    assert (auto["method"], base["method"]) == ("auto, 1s", "smc-base, 1s")
    assert base["particles"] > 4
    assert json.loads((tmp_path / "run" / "config.json").read_text())["jobs"][0]["budget"] == "1s"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "digits", "--budget", "soon"], "a budget must be a time such as '30s'"),
        (["run", "digits", "--budget", "0"], "budget must be at least 1"),
        (["run", "digits", "--budget", "30s", "--method", "svdd"], "--budget is for the method auto, and this is svdd"),
        (["run", "digits", "--budget", "10", *SMALL], "too small for a pilot"),
        (["run", "digits", "--budget", "9s", "--particles", "4"], "leave out --particles"),
        (["compare", "digits", "--methods", "auto"], "auto needs a --budget, such as 30s"),
        (["compare", "digits", "--budget", "9s", "--particles", "4"], "leave out --particles"),
        (["compare", "digits", "--budget", "9000", "--methods", "svdd"], "--budget must be a time here"),
    ],
)
def test_wrong_budgets_give_one_line(words: list[str], says: str, tmp_path: Path, capsys):
    assert tokensteer(*words, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1, error
