"""Disks that are full, folders that cannot be written to or are written to by others, and folders of old versions."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch

import tokensteer as ts
from tokensteer.app import cli
from tokensteer.app.runs.claims import claimed

TINY = ["--particles", "2", "--populations", "2", "--steps", "3"]
TWO = ["compare", "digits", "--methods", "smc-base", "svdd", *TINY]
OLD = Path(__file__).parent / "folders" / "0.1.0"


def tokensteer(*words: object) -> int:
    return cli.main([str(word) for word in words])


def in_child(words: list[str], prepare: Callable[[], None] = lambda: None) -> tuple[int, list[str]]:
    """The exit code of a command in a process that `prepare` has changed, and its lines on errors."""
    end, start = os.pipe()
    child = os.fork()
    if not child:
        code = 70
        try:
            with os.fdopen(start, "w") as said, redirect_stderr(said), redirect_stdout(io.StringIO()):
                prepare()
                code = tokensteer(*words)
        finally:
            os._exit(code)
    os.close(start)
    with os.fdopen(end) as said:
        lines = [line for line in said if not line.startswith(("1/2", "2/2"))]  # those are rows that are done
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), lines


def full_after(size: int) -> Callable[[], None]:
    """No file can be longer than this: writes fail in the kernel, as on a full disk."""

    def prepare() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    return prepare


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ts.Run:
    """A run that had room."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert tokensteer(*TWO, "--out", folder) == 0
    return ts.open_run(folder)


@pytest.mark.parametrize("blamed", ["config.json", "rows/000-digits-smc-base-n2-s0.safetensors"])
def test_a_full_disk_is_said_in_one_line_and_the_run_goes_on(blamed: str, whole: ts.Run, tmp_path: Path) -> None:
    size, folder = (whole.folder / blamed).stat().st_size, tmp_path / "out"
    code, lines = in_child([*TWO, "--out", str(folder)], full_after(size - 1))
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith(f"tokensteer: {folder / blamed} could not be written: ")
    assert not list(folder.rglob("*.unfinished"))
    assert tokensteer(*TWO, "--out", folder, "--resume") == 0
    again = ts.open_run(folder)
    for k in range(2):
        assert torch.equal(again.result(k).samples, whole.result(k).samples)
        assert torch.equal(again.result(k).log_w, whole.result(k).log_w)


READ_ONLY = Path("/proc/tokensteer")  # no one can make a folder there, not even root
needs_proc = pytest.mark.skipif(not READ_ONLY.parent.is_dir(), reason="needs /proc")


@needs_proc
@pytest.mark.parametrize("words", [["run", "digits", *TINY], TWO, ["train", "mog", "--scale", "0.001"]])
def test_a_folder_that_cannot_be_made_is_said_in_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert tokensteer(*words, "--out", READ_ONLY) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(READ_ONLY) in said


@needs_proc
def test_a_result_that_cannot_be_saved_names_its_file() -> None:
    with pytest.raises(OSError, match=r"/proc/tokensteer/x\.safetensors could not be written"):
        ts.open_run(OLD).result(0).save(READ_ONLY / "x.safetensors")


def test_a_training_leaves_a_folder_alone_that_another_process_writes_to(tmp_path: Path) -> None:
    with claimed(tmp_path / "out"):
        before = sorted((tmp_path / "out").iterdir())
        code, lines = in_child(["train", "mog", "--scale", "0.001", "--out", str(tmp_path / "out")])
        assert sorted((tmp_path / "out").iterdir()) == before
    assert code == 2
    assert len(lines) == 1
    assert f"is being written to by process {os.getpid()}" in lines[0]


# ---- a folder that version 0.1.0 wrote


def test_a_folder_of_the_first_version_opens() -> None:
    run = ts.open_run(OLD)
    assert [row["method"] for row in run.rows] == ["smc-base", "svdd"]
    result = run.result(0)
    assert result.samples.shape == (2, 2, 64)
    assert result.pooled_log_z[0] == pytest.approx(run.rows[0]["log_z"])
    assert "log Z" in repr(result)


def test_a_folder_of_the_first_version_is_reported_and_replaced(tmp_path: Path) -> None:
    shutil.copytree(OLD, tmp_path / "old")
    assert tokensteer("report", tmp_path / "old") == 0
    assert "0.1.0" in (tmp_path / "old" / "report.html").read_text()
    assert tokensteer(*TWO, "--out", tmp_path / "old", "--force") == 0
    assert json.loads((tmp_path / "old" / "config.json").read_text())["version"] == ts.__version__


def test_a_folder_of_the_first_version_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(OLD, tmp_path / "old")
    assert tokensteer(*TWO, "--out", tmp_path / "old", "--resume") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "cannot be resumed, its config.json has no options" in said
    assert "--force instead of --resume to replace the run" in said
