"""`--json` prints one object, `--config` gives options, and `report --open` opens the page."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path
from typing import Any

import pytest

import tokensteer as ts
from tokensteer.app import cli, given, options
from tokensteer.app.words import names

TINY = ["--particles", "2", "--populations", "2", "--steps", "3"]
TOML = """
task = "digits"
method = "smc-base"
particles = 2
populations = 2
steps = 3
kl = 0.5
ramp = "clipped:5"
"""


def tokensteer(*words: object) -> int:
    return cli.main([str(word) for word in words])


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The object on the standard output stream, where there must be nothing else."""
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


# ---- --json


def test_every_command_prints_one_object(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def reward(x):\n    print('called')\n    return -x.sum(-1).double()\n")
    seen: dict[str, dict[str, Any]] = {}
    for words in (
        ["run", "digits", "--method", "smc-base", *TINY, "--out", "run"],
        ["compare", "digits", "--methods", "pretrained", "smc-base", *TINY, "--out", "both"],
        ["report", "run"],
        ["check", "mine.py:reward", "--vocab", "4", "--length", "2"],
        ["doctor"],
        ["list", "tasks"],
    ):
        assert tokensteer(*words, "--json") == 0
        seen[words[0]] = printed(capsys)
        assert seen[words[0]].pop("command") == words[0]
    rows = json.loads(Path("run/results.json").read_text())
    assert seen["run"] == {"folder": "run", "rows": rows}
    assert [row["method"] for row in seen["compare"]["rows"]] == ["pretrained", "smc-base"]
    assert seen["report"] == {"report": "run/report.html", "figures": []}
    assert seen["check"] == {"target": "mine.py:reward", "holds": ["reward"]}
    assert {"name": "tokensteer", "what": ts.__version__} in seen["doctor"]["found"]
    assert seen["list"] == {"tasks": names.TASKS}
    assert all("json" in kind.__dataclass_fields__ for kind, _ in options.COMMANDS.values())


@pytest.mark.parametrize(
    "words", [["run", "digts"], ["run", "digits", "--particles", "x"], ["report", "nowhere"], ["rnu"]]
)
def test_errors_are_objects_too(words: list[str], capsys):
    assert tokensteer(*words, "--json") == 2
    assert printed(capsys).keys() == {"command", "error"}


# ---- --config


@pytest.fixture
def toml(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(TOML)
    return Path("run.toml")


def test_a_file_gives_the_options_and_the_command_line_comes_first(toml: Path):
    command = cli.parsed(["run", "--config", "run.toml", "--particles", "4"])
    assert isinstance(command, options.Run)
    assert (command.task, command.method, command.particles, command.populations) == ("digits", "smc-base", 4, 2)
    assert (command.settings.kl, command.settings.ramp, command.settings.steps) == (0.5, "clipped:5", 3)
    other = cli.parsed(["run", "mnist", "--config=run.toml"])
    assert isinstance(other, options.Run)
    assert (other.task, other.particles) == ("mnist", 2)


def test_a_file_may_leave_out_the_task(toml: Path, capsys):
    toml.write_text("seeds = [3, 4]\nmatch_rows = 'svdd'")
    command = cli.parsed(["compare", "digits", "--config", "run.toml"])
    assert isinstance(command, options.Compare)
    assert (command.task, command.seeds, command.match_rows) == ("digits", (3, 4), "svdd")
    assert tokensteer("compare", "--config", "run.toml") == 2
    assert "TASK" in capsys.readouterr().err


def test_a_run_is_run_again_from_its_config(toml: Path):
    assert tokensteer("run", "--config", "run.toml", "--out", "first") == 0
    toml.unlink()
    assert tokensteer("run", "--config", "first/config.json", "--out", "second") == 0
    first, second = (ts.open_run(name) for name in ("first", "second"))
    assert first.config["options"] == second.config["options"]
    assert first.result(0).samples.equal(second.result(0).samples)
    assert tokensteer("run", "--config", "first/config.json", "--out", "first", "--resume") == 0


def test_a_config_holds_what_was_resolved_and_no_null(toml: Path):
    """A run that leaves all to the task and the method, and the same run with what its config names."""
    words = ["--particles", "2", "--populations", "2", "--steps", "3"]
    assert tokensteer("compare", "digits", "--methods", "smc-base", "pretrained", *words, "--out", "first") == 0
    first = ts.open_run("first")
    assert "null" not in Path("first/config.json").read_text()
    same = {"steps": 3, "kl": 1.0, "goal": 4, "draws": 10, "ramp": "exponential", "noise": "fresh", "smoothing": 0.0}
    job, plain = first.config["jobs"]
    assert same.items() | {("trigger", "ess:0.5:10"), ("resample", "systematic")} <= set(_hashable(job))
    assert (plain["kl"], plain["trigger"], "ramp" in plain) == (1.0, "never", False)
    assert first.rows[0]["resolved"].items() <= job.items()
    assert tokensteer("compare", "--config", "first/config.json", "--out", "second") == 0
    second = ts.open_run("second")
    assert first.config["options"] == second.config["options"]
    assert first.config["jobs"] == second.config["jobs"]
    assert first.result(0).log_w.equal(second.result(0).log_w)
    given = [f"--{name}={job[name]}" for name in (*same, "trigger", "resample") if name != "steps"]
    assert tokensteer("run", "digits", "--method", "smc-base", *words, *given, "--out", "third") == 0
    assert first.result(0).log_w.equal(ts.open_run("third").result(0).log_w)


@pytest.mark.parametrize(("given", "used"), [([], 0.5), (["--smoothing", "0.6"], 0.6), (["--smoothing", "0"], 0.0)])
def test_the_smoothing_of_a_run_is_in_its_config(given: list[str], used: float, tmp_path: Path, monkeypatch):
    """That of smc-grad is 0.5 unless given; no other method smooths."""
    monkeypatch.chdir(tmp_path)
    words = ["--particles", "2", "--populations", "1", "--steps", "50", *given]
    assert tokensteer("compare", "digits", "--methods", "smc-base", "smc-grad", *words, "--out", "run") == 0
    base, gradient = ts.open_run("run").config["jobs"]
    assert (gradient["smoothing"], base["smoothing"]) == (used, used if given else 0.0)
    assert tokensteer("compare", "--config", "run/config.json", "--out", "again") == 0
    assert ts.open_run("again").config["jobs"] == [base, gradient]


def _hashable(table: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in table.items() if not isinstance(value, list)]


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        (TOML, ["run", "--config", "other.toml"], "there is no file other.toml"),
        ("particels = 3", ["run", "digits", "--config", "run.toml"], "Did you mean particles?"),
        ("force = true", ["run", "digits", "--config", "run.toml"], "no option in run.toml called 'force'"),
        ("a b", ["run", "digits", "--config", "run.toml"], "run.toml is no TOML file"),
        ("[particles]\nn = 3", ["run", "digits", "--config", "run.toml"], "particles of run.toml must be a text"),
        ("particles = 'x'", ["run", "digits", "--config", "run.toml"], "--particles"),
        ("method = 'svd'", ["run", "digits", "--config", "run.toml"], "no method called 'svd'. Did you mean svdd?"),
    ],
)
def test_files_that_cannot_be_read_are_refused(text: str, words: list[str], says: str, toml: Path, capsys):
    toml.write_text(text)
    assert tokensteer(*words) == 2
    assert says in capsys.readouterr().err


def test_configs_are_for_their_command(toml: Path, capsys):
    Path("config.json").write_text(json.dumps({"command": "tokensteer run digits", "options": {"task": "digits"}}))
    assert tokensteer("compare", "--config", "config.json") == 2
    assert "is of tokensteer run, and this is tokensteer compare" in capsys.readouterr().err
    Path("config.json").write_text("[]")
    assert tokensteer("run", "--config", "config.json") == 2
    assert "has no options" in capsys.readouterr().err


def test_all_that_decides_the_results_is_stored():
    known = set(given.storable(options.Run))
    assert known >= {"task", "method", "particles", "kl", "steps", "device", "memory", "weights", "prompts"}
    assert not known & {"out", "force", "resume", "config", "json"}


# ---- report --open


def test_the_report_is_opened_on_request(toml: Path, monkeypatch, capsys):
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda place: bool(opened.append(place)))
    assert tokensteer("run", "--config", "run.toml", "--out", "x") == tokensteer("report", "x") == 0
    assert opened == []
    assert tokensteer("report", "x", "--open") == 0
    assert opened == [Path("x/report.html").resolve().as_uri()]
    assert "There is no browser here" in capsys.readouterr().out
