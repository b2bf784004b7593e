"""`--resume` keeps the rows of an unfinished run, and the whole is that of an uninterrupted run."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_texts
import torch

import tokensteer as ts
from tokensteer import files
from tokensteer.app import cli
from tokensteer.app.report import write
from tokensteer.app.runs import claims, match_seconds, runner
from tokensteer.app.runs.folder import RESULTS

TINY = ["--particles", "2", "--populations", "2", "--steps", "3"]
FOUR = ["compare", "digits", "--methods", "smc-base", "svdd", "--seeds", "0", "1", *TINY]


def tokensteer(*words: object) -> int:
    return cli.main([str(word) for word in words])


def killed(*words: object, prepare: Callable[[], None]) -> None:
    """Run a command in a process that `prepare` has changed so that it kills itself."""
    child = os.fork()
    if not child:
        try:
            prepare()
            tokensteer(*words)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def kill(*given: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_job(number: int) -> Callable[[], None]:
    """The process is killed when it runs a job, counted from 0."""

    def prepare() -> None:
        run_one, left = runner.run_one, [number]

        def counted(*given: Any) -> ts.Result:
            if not left[0]:
                kill()
            left[0] -= 1
            return run_one(*given)

        runner.run_one = counted

    return prepare


def before_listing(number: int) -> Callable[[], None]:
    """The process is killed when the files of a row are written and the row is not listed."""

    def prepare() -> None:
        write_json = files.write_json

        def counted(file: Path, content: Any) -> None:
            if file.name == RESULTS and len(content) == number + 1:
                kill()
            write_json(file, content)

        files.write_json = counted

    return prepare


def in_file(number: int) -> Callable[[], None]:
    """The process is killed when a file of a row is half written."""

    def prepare() -> None:
        save = ts.Result.save

        def counted(result: ts.Result, file: Path) -> None:
            if file.name.startswith(f"{number:03d}"):
                (file.parent / f".{file.name}.{os.getpid()}-0{files.STRAY}").write_bytes(b"half")
                kill()
            save(result, file)

        ts.Result.save = counted  # type: ignore[method-assign]

    return prepare


def content(folder: Path) -> dict[str, Any]:
    """All that a run folder holds, without times."""
    found: dict[str, Any] = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            found[str(file.relative_to(folder))] = file.read_bytes()
    config = json.loads(found.pop("config.json"))
    rows = json.loads(found.pop(RESULTS))
    found["config"] = {name: value for name, value in config.items() if name not in ("started", "command")}
    found["rows"] = [{name: value for name, value in row.items() if name != "seconds"} for row in rows]
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert tokensteer(*FOUR, "--out", folder) == 0
    return folder


@pytest.mark.fast
@pytest.mark.parametrize("moment", [in_job(0), in_job(1), in_job(3), before_listing(0), before_listing(2), in_file(2)])
def test_a_killed_run_is_finished_as_if_it_had_not_been(moment: Callable[[], None], whole: Path, tmp_path: Path):
    folder = tmp_path / "run"
    killed(*FOUR, "--out", folder, prepare=moment)
    assert (folder / claims.CLAIM).exists()
    assert tokensteer(*FOUR, "--out", folder, "--resume") == 0
    assert content(folder) == content(whole)
    first, second = ts.open_run(whole), ts.open_run(folder)
    for k in range(4):
        assert torch.equal(first.result(k).samples, second.result(k).samples)
        assert torch.equal(first.result(k).log_w, second.result(k).log_w)


def test_rows_that_are_there_are_not_run_again(whole: Path, tmp_path: Path, monkeypatch, capsys):
    folder = tmp_path / "run"
    killed(*FOUR, "--out", folder, prepare=in_job(3))
    write(folder)
    times = [row["seconds"] for row in ts.open_run(folder).rows]
    capsys.readouterr()
    assert tokensteer(*FOUR, "--out", folder, "--resume") == 0
    said = capsys.readouterr()
    assert [row["seconds"] for row in ts.open_run(folder).rows[:3]] == times
    assert said.err.startswith("4/4 digits svdd")
    assert said.err.count("\n") == 1
    assert "Kept 3 rows that were there, and ran 1\n" in said.out
    assert not (folder / "report.html").exists()  # of the unfinished run
    monkeypatch.setattr(runner, "run_one", kill)
    assert tokensteer(*FOUR, "--out", folder, "--resume") == 0
    assert "Kept 4 rows that were there, and ran 0\n" in capsys.readouterr().out
    assert content(folder) == content(whole)


def test_a_single_run_can_be_resumed(tmp_path: Path):
    """One job that never finished leaves nothing, and is run; so is one in a new folder."""
    words = ["run", "mog", "--method", "smc-base", "--particles", "20", "--populations", "2", "--steps", "3"]
    assert tokensteer(*words, "--out", tmp_path / "a") == 0
    killed(*words, "--out", tmp_path / "b", prepare=before_listing(0))
    for name in ("b", "c"):
        assert tokensteer(*words, "--out", tmp_path / name, "--resume") == 0
        assert content(tmp_path / name) == content(tmp_path / "a")


def test_what_only_a_finished_method_uses_does_not_stop_the_rest(tmp_path: Path):
    words = ["compare", "digits", "--methods", "smc-base", "svdd", *TINY, "--resample", "residual"]
    killed(*words, "--out", tmp_path / "x", prepare=in_job(1))
    assert tokensteer(*words, "--out", tmp_path / "x", "--resume") == 0  # svdd alone refuses --resample


def test_times_are_those_of_the_first_run(tmp_path: Path, monkeypatch):
    """With --budget the particles are measured, and a second measurement would give others."""
    counts = iter((5, 6))
    monkeypatch.setattr(match_seconds, "particles", lambda seconds_of, seconds, fewest: (next(counts), "measured"))
    words = ["compare", "digits", "--methods", "smc-base", "--seeds", "0", "1", "--populations", "2", "--steps", "3"]
    words += ["--budget", "1s", "--out", tmp_path / "x"]
    killed(*words, prepare=in_job_after_timing)
    assert [job["particles"] for job in ts.open_run(tmp_path / "x").config["jobs"]] == [5, 5]
    next(counts)
    assert tokensteer(*words, "--resume") == 0
    assert [row["particles"] for row in ts.open_run(tmp_path / "x").rows] == [5, 5]
    assert "measured" in ts.open_run(tmp_path / "x").rows[1]["plan"]["particles"]


def in_job_after_timing() -> None:
    match_seconds._seconds = lambda ready, place: 0.1
    in_job(1)()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--kl", "0.5"], "--kl was not given and is 0.5. Give the same options"),
        (["--particles", "3"], "--particles was 2 and is 3."),
        (["--seeds", "0", "2", "--steps", "4"], "--seeds was 0 1 and is 0 2; --steps was 3 and is 4."),
        (["--force"], "give one of the two"),
    ],
)
def test_other_options_are_refused_and_named(change: list[str], says: str, whole: Path, tmp_path: Path, capsys):
    folder = shutil.copytree(whole, tmp_path / "run")
    assert tokensteer(*FOUR, *change, "--out", folder, "--resume") == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert content(folder) == content(whole)
    assert tokensteer("run", "mog", *TINY, "--out", folder, "--resume") == 2
    assert "task was digits and is mog" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("entry", "value", "says"),
    [
        ("versions", {"torch": "1.0"}, "was begun with tokensteer None"),
        ("machine", "abacus", "was begun on abacus"),
        ("jobs", [], "has other jobs"),
        ("options", None, "has no options"),
    ],
)
def test_rows_of_another_place_are_not_kept(entry: str, value: Any, says: str, whole: Path, tmp_path: Path, capsys):
    folder = shutil.copytree(whole, tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    config = {name: known for name, known in config.items() if name != entry} | (
        {} if value is None else {entry: value}
    )
    (folder / "config.json").write_text(json.dumps(config))
    assert tokensteer(*FOUR, "--out", folder, "--resume") == 2
    assert says in capsys.readouterr().err


def test_prompts_that_changed_are_refused(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("The film\n")
    words = ["run", "text", "--method", "pretrained", *TINY, "--prompts", "p.txt", "--out", "out"]
    words += ["--weights", small_texts.write_task(tmp_path / "weights")]
    assert tokensteer(*words) == 0
    assert tokensteer(*words, "--resume") == 0
    Path("p.txt").write_text("The book\n")
    assert tokensteer(*words, "--resume") == 2
    assert "the files of --prompts have changed since out was begun" in capsys.readouterr().err


def test_a_folder_of_something_else_is_refused(tmp_path: Path, capsys):
    (tmp_path / "thesis.txt").write_text("all of it")
    assert tokensteer("run", "digits", *TINY, "--out", tmp_path, "--resume") == 2
    assert "is not empty" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]
