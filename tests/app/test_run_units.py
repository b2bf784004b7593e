"""The units of a run folder: the same folder in any order, and after a kill at any moment. Ray is not needed here."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import small_texts
import torch

import tokensteer as ts
from tokensteer.app import cli, validate
from tokensteer.app.runs import folder as runs
from tokensteer.app.runs import prompts, runner
from tokensteer.app.runs.folder import UNITS
from tokensteer.app.runs.jobs import Job
from tokensteer.app.runs.prepare import Environment, prepare
from tokensteer.app.runs.units import units_of
from tokensteer.tasks.common.settings import Settings
from tokensteer.workers.pool import ThisProcess
from tokensteer.workers.units import UnitFolder

TINY = ["--particles", "2", "--populations", "3", "--steps", "3"]
SPLIT = ["compare", "digits", "--methods", "smc-base", "svdd", "pretrained", *TINY, "--islands", "2"]
WHOLE = ["compare", "digits", "--methods", "smc-base", "svdd", "pretrained", *TINY]


def tokensteer(*words: object) -> int:
    return cli.main([str(word) for word in words])


def content(folder: Path) -> dict[str, Any]:
    """All that a run folder holds, without times."""
    found: dict[str, Any] = {
        str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()
    }
    config, rows = json.loads(found.pop("config.json")), json.loads(found.pop("results.json"))
    found["config"] = {name: value for name, value in config.items() if name not in ("started", "command")}
    found["rows"] = [{name: value for name, value in row.items() if name != "seconds"} for row in rows]
    return found


def in_any_order(seed: int, stops: int | None = None) -> Callable[[ThisProcess], Iterator[tuple[Any, Any]]]:
    """Calls are done in a random order, and after `stops` of them the process kills itself."""
    rng = random.Random(seed)

    def finished(pool: ThisProcess) -> Iterator[tuple[Any, Any]]:
        for done in range(10**6):
            if done == stops:
                os.kill(os.getpid(), signal.SIGKILL)
            if not pool.waiting:
                return
            call = pool.waiting[rng.randrange(len(pool.waiting))]
            pool.waiting.remove(call)
            yield call, pool.worker(call)

    return finished


def killed(seed: int, stops: int, *words: object) -> None:
    child = os.fork()
    if not child:
        try:
            ThisProcess.finished = in_any_order(seed, stops)  # type: ignore[method-assign]
            tokensteer(*words)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Uninterrupted runs, in order."""
    place = tmp_path_factory.mktemp("uninterrupted")
    for name, words in (("split", SPLIT), ("whole", WHOLE)):
        assert tokensteer(*words, "--out", place / name) == 0
    return {name: place / name for name in ("split", "whole")}


@pytest.mark.parametrize(("name", "words"), [("split", SPLIT), ("whole", WHOLE)])
def test_the_order_of_units_does_not_matter(name: str, words: list[str], folders, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(ThisProcess, "finished", in_any_order(1))
    assert tokensteer(*words, "--out", tmp_path / "x") == 0
    assert content(tmp_path / "x") == content(folders[name])


@pytest.mark.parametrize(("name", "words", "stops"), [("split", SPLIT, 1), ("split", SPLIT, 5), ("whole", WHOLE, 2)])
def test_a_killed_run_is_finished_in_any_order(name: str, words: list[str], stops: int, folders, tmp_path, monkeypatch):
    folder = tmp_path / "x"
    killed(stops, stops, *words, "--out", folder)
    before = ts.open_run(folder)
    stored = list((folder / UNITS).glob("*.safetensors"))
    assert len(before.rows) + len(before.missing) == 3
    assert stored or before.rows
    ran: list[Any] = []
    run_one = runner.run_one
    monkeypatch.setattr(runner, "run_one", lambda *given: ran.append(1) or run_one(*given))
    monkeypatch.setattr(ThisProcess, "finished", in_any_order(7))
    assert tokensteer(*words, "--out", folder, "--resume") == 0
    each = 2 if name == "split" else 1
    assert len(ran) == 3 * each - len(before.rows) * each - len(stored)
    assert content(folder) == content(folders[name])


def test_a_row_may_be_missing_in_the_middle(folders, tmp_path: Path, capsys):
    """The first row that is finished need not be that of the first job."""
    folder = tmp_path / "x"
    killed(0, 2, *WHOLE, "--out", folder)
    run = ts.open_run(folder)
    assert [row["place"] for row in run.rows] == sorted(row["place"] for row in run.rows) != [0, 1]
    names = ["smc-base", "svdd", "pretrained"]
    assert [job["method"] for job in run.missing] == [
        name for name in names if name not in {r["method"] for r in run.rows}
    ]
    assert tokensteer("report", folder) == 0
    assert tokensteer(*WHOLE, "--out", folder, "--resume") == 0
    assert "Kept 2 rows that were there, and ran 1\n" in capsys.readouterr().out
    (folder / "report.html").unlink(missing_ok=True)
    assert content(folder) == content(folders["whole"])


def test_units_of_a_run_that_was_replaced_are_not_taken(folders, tmp_path: Path):
    """They have the names of the new run's, and other settings."""
    folder = tmp_path / "x"
    killed(0, 2, *SPLIT, "--kl", "0.1", "--out", folder)
    assert list((folder / UNITS).iterdir())
    (folder / UNITS / "mine.txt").write_text("not of a run")
    assert tokensteer(*SPLIT, "--out", folder, "--resume") == 2
    assert tokensteer(*SPLIT, "--out", folder, "--force") == 0
    assert [file.name for file in (folder / UNITS).iterdir()] == ["mine.txt"]
    (folder / UNITS / "mine.txt").unlink()
    assert content(folder) == content(folders["split"])


def test_damaged_units_are_run_again(folders, tmp_path: Path):
    folder = tmp_path / "x"
    killed(1, 1, *SPLIT, "--out", folder)
    (file,) = (folder / UNITS).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:100])
    assert tokensteer(*SPLIT, "--out", folder, "--resume") == 0
    assert content(folder) == content(folders["split"])


def test_a_folder_of_an_earlier_version_opens(folders, tmp_path: Path):
    """Rows of version 0.1 have no places, and are those of the first jobs."""
    rows = json.loads((folders["whole"] / "results.json").read_text())
    (tmp_path / "config.json").write_bytes((folders["whole"] / "config.json").read_bytes())
    old = [{name: value for name, value in row.items() if name != "place"} for row in rows[:2]]
    (tmp_path / "results.json").write_text(json.dumps(old))
    run = ts.open_run(tmp_path)
    assert runs.places(run.rows) == [0, 1]
    assert [job["method"] for job in run.missing] == ["pretrained"]


# ---- what the units are


def test_rows_without_islands_have_the_seed_of_the_run() -> None:
    """So numbers that were printed before there were units stay."""
    place, settings = Environment(), Settings(steps=2)
    jobs = [Job("digits", "smc-base", 2, 5, 3, settings), Job("digits", "smc-base", 2, 5, 3, settings, islands=2)]
    one, two = prepare(jobs, place)
    (alone,) = units_of(0, one)
    assert alone.is_row
    assert alone.job == jobs[0]
    islands = units_of(1, two)
    assert [unit.job.populations for unit in islands] == [3, 2]
    assert len({3, *(unit.job.seed for unit in islands)}) == 3
    assert [unit.job.seed for unit in units_of(9, two)] == [unit.job.seed for unit in islands]


def test_islands_are_independent_populations(folders):
    """Each has the samples of a run with its own seed, and Z is the mean over all."""
    run, place = ts.open_run(folders["split"]), Environment()
    (ready,) = prepare([Job("digits", "smc-base", 2, 3, settings=Settings(steps=3), islands=2)], place)
    first = units_of(0, ready)[0]
    alone = runner.run_one(prepare([first.job], place)[0], place, lambda record: None)
    result = run.result(0)
    assert torch.equal(result.samples[:2], alone.samples)
    assert torch.equal(result.log_w[:2], alone.log_w)
    assert run.rows[0]["log_z"] == pytest.approx(float(result.log_w.exp().mean().log()))


def test_islands_of_several_templates_stay_with_their_template() -> None:
    def result(values: list[float], templates: int) -> ts.Result:
        log_w = torch.tensor(values).unsqueeze(1)
        here = torch.zeros(2, len(values), 1)
        samples = log_w.long().unsqueeze(-1)
        states = samples[:1].expand(2, -1, -1, -1)
        options = {"states": states, "states_log_w": here[:, :1]}
        return ts.Result(
            samples, log_w, None, here[..., 0], None, here.long(), {"denoiser": 1}, {}, None, None, templates, **options
        )

    found = prompts.joined([result([1, 2, 3, 4], 2), result([5, 6], 2)])
    assert found.log_w.flatten().tolist() == [1, 2, 5, 3, 4, 6]
    assert found.rows == {"denoiser": 2}
    beside = prompts.side_by_side([result([1, 2], 1), result([3, 4], 1)])
    assert (beside.templates, beside.log_w.flatten().tolist()) == (2, [1, 2, 3, 4])


def test_a_prompt_that_fails_leaves_the_others(tmp_path: Path, monkeypatch):
    (tmp_path / "p.txt").write_text("The film\nThe book\nThe end\n")
    run_one = runner.run_one

    def fails(ready: Any, *given: Any) -> ts.Result:
        if ready.task.prompted.prompts[0].text == "The book":
            raise ValueError("no books")
        return run_one(ready, *given)

    monkeypatch.setattr(runner, "run_one", fails)
    words = ["run", "text", "--method", "smc-base", "--prompts", tmp_path / "p.txt", *TINY, "--split-prompts"]
    words += ["--weights", small_texts.write_task(tmp_path / "weights")]
    assert tokensteer(*words, "--out", tmp_path / "x") == 0
    run = ts.open_run(tmp_path / "x")
    assert run.rows[0]["failed"] == [{"prompt": "The book", "id": "2", "error": "no books"}]
    assert run.rows[0]["populations"] == 6
    assert run.result(0).templates == 2
    monkeypatch.setattr(runner, "run_one", lambda *given: (_ for _ in ()).throw(ValueError("no texts")))
    assert tokensteer(*words, "--out", tmp_path / "y") == 2


def test_a_stored_unit_of_another_size_is_none(tmp_path: Path, folders):
    result = ts.open_run(folders["whole"]).result(0)
    stored = UnitFolder(tmp_path)
    stored.write("a", result, {"seconds": 1.0})
    assert stored.read("a", 3, 2) is not None
    assert stored.read("a", 3, 4) is None
    assert stored.read("b", 3, 2) is None


# ---- refusals


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--islands", "4"], "--islands must be at most 3, got 4"),
        (["--islands", "0"], "--islands must be at least 1"),
        (["--workers", "0"], "--workers must be at least 1"),
        (["--gpus-per-worker", "1"], "--gpus-per-worker is for several workers: give --workers or --ray too"),
        (["--workers", "2", "--gpus-per-worker", "-1"], "--gpus-per-worker must be 0 or more"),
        (["--workers", "2"], "several workers need Ray: pip install 'tokensteer[ray]'"),
        (["--ray", "auto"], "several workers need Ray: pip install 'tokensteer[ray]'"),
        (["--method", "auto", "--islands", "2"], "auto plans a row as a whole"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(change: list[str], says: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(validate, "find_spec", lambda name: None)
    size = ["--populations", "3", "--steps", "3"]
    assert tokensteer("run", "digits", *size, *change, "--out", tmp_path / "x") == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_units_that_were_not_removed_in_time_are_removed(folders, tmp_path: Path):
    folder = tmp_path / "x"
    shutil.copytree(folders["split"], folder)
    UnitFolder(folder / UNITS).write("000-digits-smc-base-n2-s0-0-1", ts.open_run(folder).result(0), {})
    assert tokensteer(*SPLIT, "--out", folder, "--resume") == 0
    assert content(folder) == content(folders["split"])
