"""The method auto: what pilots choose within a budget, and how it is written down."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

import pytest
import small_texts

import tokensteer as ts
from tokensteer.app import cli
from tokensteer.app.runs import match_seconds
from tokensteer.app.runs.jobs import Job
from tokensteer.app.runs.prepare import Environment, PreparedJob
from tokensteer.tasks.common.settings import Settings

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
    assert "learned" in row["plan"]["proposal"]  # where one was trained, the search begins with it
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


@pytest.fixture
def seen(monkeypatch) -> list[tuple[float | None, ...]]:
    """The clips that auto asks for; it has the gradient of the first alone."""
    asked: list[tuple[float | None, ...]] = []

    def one(steering: ts.Steering, clips: tuple[float | None, ...]) -> dict[str, ts.Proposal]:
        asked.append(clips)
        return {"gradient": ts.Gradient(clip=clips[0], tokens_only=True)}

    monkeypatch.setattr("tokensteer.app.runs.auto.usual_proposals", one)
    return asked


@pytest.mark.parametrize(
    ("given", "share", "clips"),
    [([], 0.5, (1.0, 3.0)), (["--smoothing", "0.3"], 0.3, (1.0, 3.0)), (["--clip", "2"], 0.5, (2.0,))],
)
def test_what_pilots_choose_is_in_the_config(given: list[str], share: float, clips: tuple, seen: list, tmp_path: Path):
    """And the run is run again from it. Goal 3 has no learned proposal."""
    words = ["--goal", "3", "--steps", "50", "--populations", "1", "--budget", "600", "--draws", "1", *given]
    assert tokensteer("run", "digits", *words, "--out", tmp_path / "first") == 0
    assert tokensteer("run", "--config", tmp_path / "first" / "config.json", "--out", tmp_path / "second") == 0
    first, second = (ts.open_run(tmp_path / name) for name in ("first", "second"))
    (job,) = first.config["jobs"]
    row = first.rows[0]
    assert row["resolved"].items() <= job.items()
    assert (job["smoothing"], job["clip"], job["trigger"]) == (share, clips[0], "ess:0.5:10")
    assert row["plan"]["smoothing"].startswith(f"{share:g}, an average over recent steps")
    assert seen == [clips, clips]
    assert first.config["options"] == second.config["options"]
    assert second.config["jobs"] == [job]
    assert first.result(0).log_w.equal(second.result(0).log_w)
    resumed = ["run", "digits", *words, "--out", tmp_path / "first", "--resume"]
    assert tokensteer(*resumed) == 0  # what was added to the config makes it no other run


@pytest.mark.parametrize(
    ("words", "clip"),
    [
        (["--method", "smc-grad", "--reward", "toxicity"], 30.0),
        (["--method", "prop-grad", "--reward", "toxicity"], 30.0),
        (["--budget", "300", "--reward", "toxicity"], 30.0),
        (["--method", "smc-grad", "--reward", "toxicity", "--clip", "2"], 2.0),
        (["--budget", "300", "--reward", "toxicity", "--clip", "2"], 2.0),
        (["--method", "smc-grad"], 1.0),
        (["--method", "prop-grad"], 3.0),
        (["--budget", "300"], 1.0),
    ],
)
def test_the_gradient_of_toxicity_has_a_larger_clip(words: list[str], clip: float, seen: list, tmp_path: Path):
    """A rude word has a log-probability that a smaller one does not make up for (docs/text.md)."""
    small = ["--weights", small_texts.write_task(tmp_path / "weights"), "--steps", "4", "--populations", "1"]
    small += ["--prompt", "the film", "--out", tmp_path / "run"]
    assert tokensteer("run", "text", *words, *small) == 0
    assert ts.open_run(tmp_path / "run").config["jobs"][0]["clip"] == clip
    assert seen == ([] if "--budget" not in words else [(2.0,) if clip == 2.0 else (clip, 3.0)])


def test_the_choice_is_told_and_reported(planned: Path, tmp_path: Path, capsys):
    words = ["run", "digits", "--budget", "3000", *SMALL, "--draws", "1", "--ramp", "constant", "--trigger", "every:2"]
    assert tokensteer(*words, "--out", tmp_path / "run") == 0
    said = capsys.readouterr().out
    told = said[said.index("Chosen for auto, seed 0:") : said.index("Run folder")]
    assert "In brackets" not in told  # nothing was left to compare
    assert "  trigger   every:2\n" in told
    assert "  ramp      constant\n" in told
    assert tokensteer("report", tmp_path / "run") == 0
    assert told in capsys.readouterr().out
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    reasons = ts.open_run(tmp_path / "run").rows[0]["plan"]
    listed = "".join(f"<dt>{name}</dt><dd>{escape(reason)}</dd>" for name, reason in reasons.items())
    assert f"<h3>auto, seed 0</h3><dl>{listed}</dl>" in page


def test_methods_get_equal_time(tmp_path: Path, capsys):
    words = ["compare", "digits", "--methods", "auto", "smc-base", "--budget", "1s", "--seeds", "0", "1", *SMALL]
    assert tokensteer(*words, "--draws", "1", "--ramp", "linear", "--out", tmp_path / "run") == 0
    auto, _, base, other = ts.open_run(tmp_path / "run").rows
    assert (auto["method"], base["method"]) == ("auto, 1s", "smc-base, 1s")
    assert base["particles"] == other["particles"] > 4  # timed once, so that seeds can be joined
    assert json.loads((tmp_path / "run" / "config.json").read_text())["jobs"][0]["budget"] == "1s"
    capsys.readouterr()
    assert tokensteer("report", tmp_path / "run") == 0
    why = base["plan"]["particles"]
    assert why.startswith(f"{base['particles']:,}: ")
    assert f"Chosen for smc-base, 1s, seeds 0, 1:\n  particles {why}\n" in capsys.readouterr().out
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert f"<h3>smc-base, 1s, seeds 0, 1</h3><dl><dt>particles</dt><dd>{why}</dd></dl>" in page


@pytest.mark.parametrize(
    ("start", "each", "flat", "fits"),
    [
        (0.5, 0.1, 0, 95),  # as on one core
        (0.5, 0.1, 100, 195),  # the first hundred together take no longer than one, as on a GPU
        (30.0, 0.1, 0, 1),  # the start alone takes longer
        (1.0, 3.0, 0, 3),
    ],
)
def test_particles_that_fit_into_ten_seconds(start: float, each: float, flat: int, fits: int):
    count, why = match_seconds.particles(lambda n: start + each * max(0, n - flat), 10.0)
    assert count == pytest.approx(fits, rel=0.2, abs=1)
    assert why.startswith(f"{count}: ")


@pytest.mark.parametrize(
    ("each", "fits", "whole"), [(0.1, 100, 6.0), (0.82, 12, 11.0), (2.0, 5, 8.0), (3.3, 3, 3.3), (30.0, 1, 30.0)]
)
def test_timing_on_a_cpu_takes_about_the_time_itself_at_most(each: float, fits: int, whole: float):
    spent = [0.0]

    def seconds_of(count: int) -> float:
        spent[0] += each * count
        return each * count

    count, _ = match_seconds.particles(seconds_of, 10.0, 1)
    assert count == pytest.approx(fits, rel=0.02)
    assert spent[0] <= whole + 1e-9


def test_methods_of_sweeps_are_timed_with_two_particles_at_least(tmp_path: Path):
    words = ["compare", "mog", "--methods", "particle-gibbs", "smc-base", "--budget", "1s", "--steps", "5"]
    assert tokensteer(*words, "--populations", "1", "--out", tmp_path / "run") == 0


def test_noise_in_the_time_of_few_particles_gives_no_absurd_number():
    """The first run is slower than the second."""
    assert match_seconds.particles(lambda n: 3.0 if n == 4 else 2.9, 10.0)[0] < 200


def test_a_setting_that_only_others_use_does_not_stop_the_timing(tmp_path: Path):
    words = ["compare", "digits", "--methods", "smc-base", "svdd", "--budget", "1s", *SMALL, "--draws", "1"]
    assert tokensteer(*words, "--resample", "multinomial", "--out", tmp_path / "run") == 0


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


def test_a_budget_too_small_for_several_prompts_is_said(tmp_path: Path, capsys):
    """Prompts that fail are left out of a row, but a plan is of all prompts together."""
    words = ["run", "text", "--weights", small_texts.write_task(tmp_path / "weights"), "--steps", "4"]
    words += ["--prompt", "the film", "the book", "--populations", "1", "--budget", "4"]
    assert tokensteer(*words, "--out", tmp_path / "out") == 2
    assert "too small for a pilot" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("rows/*"))


def test_a_folder_that_is_taken_is_refused_before_methods_are_timed(tmp_path: Path, capsys, monkeypatch):
    def timed(*_: object) -> None:
        raise AssertionError("methods are timed")

    monkeypatch.setattr("tokensteer.app.commands.compare.within", timed)
    (tmp_path / "mine.txt").write_text("mine")
    words = ["compare", "digits", "--methods", "smc-base", "--budget", "9s", *SMALL]
    assert tokensteer(*words, "--out", tmp_path) == 2
    assert "is not empty: give --out another folder" in capsys.readouterr().err


def test_a_device_loads_its_kernels_before_the_clock_starts(monkeypatch):
    """Once for all seeds, with real networks. A CPU has none to load."""
    ran: list[Job] = []
    real = match_seconds.run_one

    def run_one(ready: PreparedJob, *rest: Any) -> Any:
        ran.append(ready.job)
        return real(ready, *rest)

    monkeypatch.setattr(match_seconds, "run_one", run_one)
    jobs = [Job("digits", "auto", 16, 8, seed, Settings(3, goal=4)) for seed in (0, 1)]
    cpu = Environment()
    assert [job.budget for job in match_seconds.within(jobs, "4s", cpu)] == ["4s", "4s"]
    assert not ran
    assert [job.budget for job in match_seconds.within(jobs, "4s", Environment(device="cpu:0"))] == ["4s", "4s"]
    assert [(job.populations, job.particles) for job in ran] == [(1, match_seconds.FIRST)]
