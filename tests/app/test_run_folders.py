"""Run folders: one writer at a time, no crash that loses them, and nothing believed that is read from them."""

from __future__ import annotations

import ast
import copy
import json
import math
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tokensteer as ts
from tokensteer import files
from tokensteer.app import cli
from tokensteer.app.report import write
from tokensteer.app.runs import claims, runner
from tokensteer.app.runs import folder as runs

SOURCE = Path(ts.__file__).parent
CONFIG = {"format": runs.FORMAT, "command": "tokensteer run digits", "version": "0", "started": "2025-11-15"}
TINY = ["--particles", "2", "--populations", "2", "--steps", "3"]


def tokensteer(*words: object) -> int:
    return cli.main([str(word) for word in words])


def toy(value: float = 0.0) -> ts.Result:
    here = torch.arange(3).expand(2, 2, 3)
    return ts.Result(
        samples=torch.zeros(2, 3, 4, dtype=torch.long),
        log_w=torch.full((2, 3), value),
        reward=None,
        ess=torch.full((2, 2), 3.0),
        mean_reward=None,
        ancestors=here.contiguous(),
        rows={"denoiser": 6},
    )


def row(method: str) -> dict[str, Any]:
    who = {"task": "digits", "method": method, "particles": 3, "populations": 2, "seed": 0, "about": "a test"}
    return {**who, "metrics": {}, "log_z": 0.0, "log_z_error": None, "rows": {}, "saved": {}, "seconds": 1.0}


def fill(folder: Path, *methods: str, force: bool = False) -> None:
    with runs.writing(folder, CONFIG, force) as writer:
        for method in methods:
            writer.add(method, row(method), toy(), {".png": lambda file: files.write_bytes(file, b"x")})


def names(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


# ---- one writer at a time


def test_a_folder_is_held_by_one_writer(tmp_path: Path):
    folder = tmp_path / "run"
    with runs.writing(folder, CONFIG) as writer:
        for force in (False, True):
            refused = pytest.raises(
                BlockingIOError, match=rf"is being written to by process {os.getpid()}: wait for it"
            )
            with refused, runs.writing(folder, CONFIG, force):
                pass
        writer.add("a", row("a"), toy(), {})
    assert names(folder) == ["config.json", "results.json", "rows/000-a.safetensors"]
    fill(folder, "b", force=True)
    assert [row["method"] for row in ts.open_run(folder).rows] == ["b"]


def test_of_two_processes_one_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command = [sys.executable, "-m", "tokensteer", "run", "digits", *TINY, "--force", "--out", str(tmp_path / "x")]
    first = subprocess.Popen([*command, "--steps", "20000"], stderr=subprocess.PIPE, text=True)
    try:
        limit = time.monotonic() + 60
        while not (tmp_path / "x" / claims.CLAIM).exists() and time.monotonic() < limit:
            time.sleep(0.02)
        assert tokensteer(*command[3:]) == 2
        assert first.poll() is None, "the first was over before the second began"
        assert f"is being written to by process {first.pid}" in capsys.readouterr().err
    finally:
        first.kill()
        first.wait()
    assert (tmp_path / "x" / claims.CLAIM).exists()
    assert tokensteer("run", "digits", *TINY, "--out", tmp_path / "x") == 0  # its process is gone
    assert not (tmp_path / "x" / claims.CLAIM).exists()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_claim_ends_with_an_error(tmp_path: Path, error: type[BaseException]):
    with pytest.raises(error), runs.writing(tmp_path / "a" / "b", CONFIG):
        raise error
    assert list(tmp_path.iterdir()) == []


def test_claims_know_processes_by_their_start(tmp_path: Path):
    held = {"pid": os.getpid(), "host": claims.platform.node(), "start": "an earlier process of this number"}
    (tmp_path / claims.CLAIM).write_text(json.dumps(held))
    with claims.claimed(tmp_path):
        pass
    for content, who in ((json.dumps({**held, "host": "elsewhere"}), "on elsewhere"), ("", "another process")):
        (tmp_path / claims.CLAIM).write_text(content)
        with pytest.raises(BlockingIOError, match=rf"{who}.*delete"), claims.claimed(tmp_path):
            pass
        assert (tmp_path / claims.CLAIM).read_text() == content


# ---- what --force may replace


@pytest.mark.parametrize("config", ['{"format": "json"}', '{"format": 1}', "[]", "{", '{"name": "another tool"}'])
def test_force_leaves_folders_of_others_alone(config: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "000-mine.safetensors").write_text("mine")
    with pytest.raises(ValueError, match="holds no run that --force could replace"):
        fill(tmp_path, "a", force=True)
    assert names(tmp_path) == ["config.json", "rows/000-mine.safetensors"]


@pytest.mark.parametrize("part", ["rows", "figures"])
def test_force_does_not_follow_links(part: str, tmp_path: Path):
    fill(tmp_path / "run", "a")
    shutil.rmtree(tmp_path / "run" / part, ignore_errors=True)
    other = tmp_path / "other"
    other.mkdir()
    for name in ("000-a.safetensors", "000-a.png", "digits-traces.png"):
        (other / name).write_text("of another run")
    (tmp_path / "run" / part).symlink_to(other)
    with pytest.raises(ValueError, match=f"{part} is a link or a file"):
        fill(tmp_path / "run", "b", force=True)
    assert len(names(other)) == 3


def test_force_removes_files_of_the_run_and_no_others(tmp_path: Path):
    fill(tmp_path, "a", "b")
    (tmp_path / "figures").mkdir()
    mine = ["figures/mine.png", "rows/notes.png", "rows/mine.safetensors", "notes.txt"]
    for name in [*mine, "figures/digits-traces.png", "report.html", ".results.json.999999999-0.unfinished"]:
        (tmp_path / name).write_text("x")
    (tmp_path / "rows" / ".x.999999999-0.unfinished").write_text("x")
    fill(tmp_path, "c", force=True)
    run = ["config.json", "results.json", "rows/000-c.png", "rows/000-c.safetensors"]
    assert names(tmp_path) == sorted([*run, *mine])


def test_a_run_may_be_in_a_linked_folder(tmp_path: Path):
    (tmp_path / "there").mkdir()
    (tmp_path / "here").symlink_to(tmp_path / "there")
    fill(tmp_path / "here", "a")
    fill(tmp_path / "here", "b", force=True)
    assert ts.open_run(tmp_path / "there").result(0).log_w.shape == (2, 3)


# ---- crashes


def crashes(at: int, folder: Path) -> bool:
    """Whether a process that overwrites a run is killed before its change number `at` of the disk."""
    child = os.fork()
    if not child:
        left = [at]

        def counted(change: Any) -> Any:
            def changed(*given: Any, **named: Any) -> Any:
                if not left[0]:
                    os._exit(9)
                left[0] -= 1
                return change(*given, **named)

            return changed

        for name in ("write_bytes", "replace", "rename", "unlink", "mkdir", "rmdir", "chmod"):
            setattr(Path, name, counted(getattr(Path, name)))
        os.open = counted(os.open)
        try:
            fill(folder, "new", force=True)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_a_crash_at_any_moment_leaves_a_folder_that_can_be_used(tmp_path: Path):
    at, seen = 0, set()
    while True:
        folder = tmp_path / str(at)
        fill(folder, "old")
        (folder / "report.html").write_text("of the old run")
        if not crashes(at, folder):
            break
        run = ts.open_run(folder)
        for k, row in enumerate(run.rows):
            assert run.result(k).log_w.shape == (2, 3)
            assert run.picture(k).is_file()
            seen.add(row["method"])
        fill(folder, "last", force=True)
        assert names(folder) == ["config.json", "results.json", "rows/000-last.png", "rows/000-last.safetensors"]
        at += 1
    assert at > 20
    assert seen == {"old", "new"}


def test_a_crash_in_a_new_folder_leaves_one_that_can_be_used(tmp_path: Path):
    at = 0
    while crashes(at, tmp_path / str(at)):
        fill(tmp_path / str(at), "last", force=True)
        assert len(names(tmp_path / str(at))) == 4
        at += 1
    assert at > 10


def test_a_run_that_was_stopped_before_its_list_of_rows_opens_without_rows(tmp_path: Path, capsys: Any):
    fill(tmp_path, "a")
    (tmp_path / "results.json").unlink()
    assert ts.open_run(tmp_path).rows == []
    assert tokensteer("report", tmp_path) == 2
    assert "has no finished row to report on" in capsys.readouterr().err


# ---- a full disk


def test_a_copy_of_a_missing_file_names_that_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="absent"):
        files.copy(tmp_path / "absent", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_full_disk_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    def full(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert tokensteer("run", "digits", "--method", "pretrained", *TINY, "--out", tmp_path / "x") == 2
    said = capsys.readouterr().err
    assert said == f"tokensteer: {tmp_path / 'x' / 'config.json'} could not be written: No space left on device\n"


# ---- files outside


@pytest.mark.parametrize("place", ["../other/000-a", "ABSOLUTE", "rows/link"])
def test_rows_name_no_files_outside_of_their_folder(place: str, tmp_path: Path):
    for name in ("other", "run"):
        fill(tmp_path / name, "a")
    shutil.move(tmp_path / "other" / "rows" / "000-a.safetensors", tmp_path / "other" / "000-a.safetensors")
    (tmp_path / "run" / "rows" / "link.safetensors").symlink_to(tmp_path / "other" / "000-a.safetensors")
    name = f"{place.replace('ABSOLUTE', str(tmp_path / 'other' / '000-a'))}.safetensors"
    rows = json.loads((tmp_path / "run" / "results.json").read_text())
    changed = rows[0] | {"file": name, "picture": name, "written": [name]}
    (tmp_path / "run" / "results.json").write_text(json.dumps([changed]))
    run = ts.open_run(tmp_path / "run")
    for look in (run.result, run.picture, run.written):
        with pytest.raises(ValueError, match=r"row 0 of .*results.json names a file outside of the folder"):
            look(0)
    with pytest.raises(ValueError, match="outside of the folder"):
        write(tmp_path / "run")


# ---- unfinished runs


def test_the_report_of_an_unfinished_run_names_what_is_missing_and_no_winner(tmp_path, monkeypatch, capsys):
    run_one, done = runner.run_one, []

    def stopped(*given):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return run_one(*given)

    words = ["compare", "digits", "--methods", "pretrained", "smc-base", "best-of-n", "svdd", *TINY]
    assert tokensteer(*words, "--out", tmp_path / "all") == 0
    assert "Unfinished" not in capsys.readouterr().out
    monkeypatch.setattr(runner, "run_one", stopped)
    assert tokensteer(*words, "--out", tmp_path / "some") == 130
    missing = "best-of-n, N = 2, seed 0; svdd, N = 2, seed 0"
    assert f"Unfinished: 2 of 4 rows. Missing: {missing}\n" in capsys.readouterr().out
    finished, unfinished = (write(tmp_path / name).read_text("utf-8") for name in ("all", "some"))
    assert f"Unfinished: 2 of 4 rows are there, so no method is called best. Missing: {missing}." in unfinished
    for winner in ("★", "has the highest"):
        assert winner in finished
        assert winner not in unfinished
    assert "Unfinished" not in finished


# ---- damaged and hostile folders


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mutated") / "run"
    words = ["--particles", "2", "--populations", "2", "--steps", "3", "--seeds", "0", "1", "--methods", "smc-base"]
    assert tokensteer("compare", "digits", *words, "--out", folder) == 0
    return folder


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values of a JSON document are."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*path, key))


def with_value(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(document)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return changed


VALUES = (None, "words", [1, "a"], {"a": []}, -7, 1e308, math.nan, True, "../../x")


def json_mutants(content: bytes, rng: random.Random) -> Iterator[bytes]:
    """Each value in turn replaced by one of another type, so that every type is seen at every depth."""
    document = json.loads(content)
    for path in places(document):
        for value in [rng.choice(VALUES)] if path else VALUES:
            yield json.dumps(with_value(document, path, value)).encode()


def byte_mutants(content: bytes, rng: random.Random, count: int, within: int) -> Iterator[bytes]:
    """Bits flipped and bytes deleted in the first `within` bytes, and the file cut off."""
    for _ in range(count):
        at = rng.randrange(min(within, len(content)))
        yield content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
    for _ in range(count // 4):
        at = rng.randrange(min(within, len(content)))
        yield content[:at] + content[at + rng.randrange(1, 9) :]
        yield content[: rng.randrange(len(content))]


def header_mutants(content: bytes, rng: random.Random) -> Iterator[bytes]:
    """Names, types and shapes of tensors changed in the header of a safetensors file."""
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    for path in places(header):
        changed = json.dumps(with_value(header, path, rng.choice(("I64", "F32", "U8", [2, 2], [0], [1], 3)))).encode()
        yield struct.pack("<Q", len(changed)) + changed + content[8 + size :]
    for name in header:
        changed = json.dumps({key: value for key, value in header.items() if key != name}).encode()
        yield struct.pack("<Q", len(changed)) + changed + content[8 + size :]


def tensor_mutants(file: Path) -> Iterator[bytes]:
    """Extreme values in every tensor."""
    from safetensors.torch import load_file, save

    tensors = load_file(str(file))
    for name, tensor in tensors.items():
        extremes = (math.nan, math.inf, -math.inf, 3e38, -3e38) if tensor.is_floating_point() else (-1, 2**62, 7)
        for value in extremes:
            changed = tensor.clone()
            changed.flatten()[-1] = value
            yield save({**tensors, name: changed})
            yield save({**tensors, name: torch.full_like(tensor, value)})


def mutants(folder: Path, rng: random.Random) -> Iterator[tuple[Path, bytes]]:
    tensors = sorted((folder / "rows").glob("*.safetensors"))[0]
    for name, few in (("config.json", 8), ("results.json", 16)):
        content = (folder / name).read_bytes()
        for mutant in [*json_mutants(content, rng), *byte_mutants(content, rng, few, len(content))]:
            yield folder / name, mutant
    content = tensors.read_bytes()
    made = [*byte_mutants(content, rng, 16, len(content)), *byte_mutants(content, rng, 16, 900)]
    for mutant in [*made, *header_mutants(content, rng), *tensor_mutants(tensors), b""]:
        yield tensors, mutant


def test_damaged_folders_give_a_report_or_one_line(run_folder: Path, capsys: pytest.CaptureFixture[str]):
    seen = {0: 0, 2: 0}
    for file, mutant in mutants(run_folder, random.Random(0)):
        whole = file.read_bytes()
        file.write_bytes(mutant)
        capsys.readouterr()
        try:
            code = tokensteer("report", run_folder)
        except Exception as error:
            raise AssertionError(f"{file.name}: {mutant[:3000]!r}") from error
        finally:
            file.write_bytes(whole)
        said = capsys.readouterr().err
        assert said.count("\n") == (1 if code else 0), said
        if code:
            assert file.name in said or "is no run folder" in said or "was written in format" in said, said
        seen[code] += 1
    assert seen[0] > 20
    assert seen[2] > 100


# ---- one writer for everything


WRITES = {"write_text", "write_bytes", "save_file", "savefig", "copyfile", "copy2", "copytree", "touch", "save"}
MODULES = {"shutil", "np", "torch", "safetensors"}


def other_writes(tree: ast.AST, inside: bool = False) -> Iterator[int]:
    """Lines that write to disk without `tokensteer.files`, unless they are in an argument of write_whole."""
    if isinstance(tree, ast.Call):
        function = tree.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        owner = (
            function.value.id if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) else ""
        )
        modes = [a.value for a in [*tree.args, *(k.value for k in tree.keywords)] if isinstance(a, ast.Constant)]
        opens = name == "open" and any(
            isinstance(mode, str) and mode[:1] in set("wax") and len(mode) <= 3 for mode in modes
        )
        writes = name in WRITES - {"save"} or (name == "save" and owner in MODULES)
        if (writes or opens) and owner != "files" and not inside:
            yield tree.lineno
        inside = inside or name == "write_whole"
    for child in ast.iter_child_nodes(tree):
        yield from other_writes(child, inside)


def test_there_is_one_way_to_write_files():
    found = {
        f"{file.relative_to(SOURCE)}:{line}"
        for file in SOURCE.rglob("*.py")
        if file.name not in ("files.py", "arrays.py")  # arrays.py opens the place that write_whole gives it
        for line in other_writes(ast.parse(file.read_text("utf-8")))
    }
    assert found == set()


def test_the_search_for_writes_finds_them():
    bad = "f.write_text(x)\nopen(f, 'w')\nf.open(mode='wb')\nshutil.copyfile(a, b)\nsave_file(t, f)\ntorch.save(x, f)"
    assert list(other_writes(ast.parse(bad))) == [1, 2, 3, 4, 5, 6]
    good = "files.write_text(f, x)\nwrite_whole(f, lambda p: save_file(t, p))\nopen(f)\nopen(f, 'rb')\nresult.save(f)"
    assert list(other_writes(ast.parse(good))) == []
