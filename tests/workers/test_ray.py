"""Ray: as many workers as wanted, workers and machines that die, and the results of one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toys

import tokensteer as ts
from tests.faults.ray_kills import is_worker
from tests.helpers.ray_cluster import descendants

ray: Any = pytest.importorskip("ray")
TOY = toys.Toy(next(iter(toys.GOLDEN["toys"])))
NAMES = [f"unit {k}" for k in range(6)]
STEPS = "40"
SPLIT = ["compare", "digits", "--methods", "smc-base", "svdd", "--particles", "8", "--populations", "4"]
SPLIT += ["--steps", STEPS, "--seeds", "0", "1", "--islands", "4"]


def make_steering() -> ts.Steering:
    return ts.Steering(TOY.model("mdm"), TOY.tilt("mdm"))


def same(first: dict[str, ts.Result], second: dict[str, ts.Result]) -> bool:
    """Whether samples and weights are equal bit for bit."""
    return list(first) == list(second) and all(
        torch.equal(one.samples, second[name].samples) and torch.equal(one.log_w, second[name].log_w)
        for name, one in first.items()
    )


@pytest.fixture(scope="module")
def here() -> dict[str, ts.Result]:
    """What this process gives."""
    return ts.scatter(make_steering, NAMES, 8, 2)


@pytest.fixture
def running() -> Iterator[None]:
    """Ray runs in this process, so that a pool need not start it."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    yield
    ray.shutdown()


def test_two_workers_give_the_results_of_one(
    here: dict[str, ts.Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray is started and stopped again. The home folder is missing, as in a container, and is not made."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert same(ts.scatter(make_steering, NAMES, 8, 2, workers=2, progress=True), here)
    assert not ray.is_initialized()
    assert not (tmp_path / "home").exists()


@pytest.mark.slow
def test_workers_that_die_are_replaced_and_errors_are_raised_here(running: None, here: Any, tmp_path: Path) -> None:
    flag = tmp_path / "died"

    def dies_once() -> Any:
        def steer(name: str) -> ts.Steering:
            if name == NAMES[2] and not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return make_steering()

        return steer

    def always_dies() -> Any:
        return lambda name: os.kill(os.getpid(), signal.SIGKILL)

    def fails() -> Any:
        def steer(name: str) -> ts.Steering:
            raise FloatingPointError(f"no luck with {name}")

        return steer

    assert same(ts.scatter(dies_once, NAMES, 8, 2, workers=2), here)
    assert flag.exists()
    with pytest.raises(ChildProcessError, match=r"the unit 'a' has ended 3 workers.*use fewer particles or workers"):
        ts.scatter(always_dies, ["a"], workers=2)
    with pytest.raises(FloatingPointError, match="no luck with a") as raised:
        ts.scatter(fails, ["a"], workers=2)
    assert "in the unit 'a'" in raised.value.__notes__
    with pytest.raises(ValueError, match="2 workers with 8 GPUs each do not fit"):
        ts.scatter(make_steering, ["a"], workers=2, gpus_per_worker=8)
    assert ray.is_initialized()  # it was not ours to stop


def test_a_cluster_that_is_not_there_is_named() -> None:
    with pytest.raises(ConnectionError, match=r"no Ray cluster answers at auto.*`ray start --head`"):
        ts.scatter(make_steering, ["a"], ray="auto")


# ---- the command line


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "tokensteer", *map(str, words)]


def content(folder: Path) -> dict[str, Any]:
    """All that a run folder holds, without times."""
    found: dict[str, Any] = {
        str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()
    }
    config, rows = json.loads(found.pop("config.json")), json.loads(found.pop("results.json"))
    found["config"] = {name: value for name, value in config.items() if name not in ("started", "command")}
    found["rows"] = [{name: value for name, value in row.items() if name != "seconds"} for row in rows]
    return found


def wait_for_units(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Wait until so many units of a run that goes on are done."""
    limit = time.monotonic() + 300
    while len(list((folder / "units").glob("*.safetensors"))) < count and not list((folder / "rows").glob("*.png")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit, "it takes too long"
        time.sleep(0.05)
    assert process.poll() is None, "it was over before it could be interrupted"


def wait_for_actor(raylet: int, process: subprocess.Popen[str]) -> None:
    """Wait until a worker of a node runs a unit; Ray calls processes after what they do."""

    def works(child: str) -> bool:
        place = Path(f"/proc/{child}/cmdline")
        return place.exists() and place.read_bytes().startswith(b"ray::Actor.call")

    while not any(map(works, Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split())):
        assert process.poll() is None, "it was over before its second worker began"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    subprocess.run(command(*SPLIT, "--out", folder), check=True, capture_output=True)
    return content(folder)


@pytest.mark.slow
def test_one_of_two_machines_is_killed(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    """Two nodes of one CPU each; the second is killed half-way. Its workers die with it, and none can replace them."""
    cluster_utils: Any = pytest.importorskip("ray.cluster_utils")
    size = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    try:
        node = cluster.add_node(**size)
        words = [*SPLIT, "--workers", 2, "--ray", cluster.address, "--out", tmp_path / "x"]
        process = subprocess.Popen(command(*words), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        wait_for_units(tmp_path / "x", 3, process)
        (raylet,) = node.all_processes["raylet"]
        wait_for_actor(raylet.process.pid, process)
        os.kill(raylet.process.pid, signal.SIGKILL)
        said = process.communicate(timeout=500)
        assert process.returncode == 0, said
    finally:
        cluster.shutdown()
    assert content(tmp_path / "x") == uninterrupted


@pytest.mark.slow
def test_a_worker_that_dies_while_it_starts_is_replaced(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    """Ray waited forever for a worker of its own that had not registered yet."""
    process = subprocess.Popen(
        command(*SPLIT, "--workers", 2, "--out", tmp_path / "x"),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while not (workers := [each for each in descendants(process.pid) if is_worker(each)]):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.kill(workers[0], signal.SIGKILL)
    said = process.communicate(timeout=500)
    assert process.returncode == 0, said
    assert content(tmp_path / "x") == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("moment", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_is_gone_on_with(moment: int, uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    """Ctrl-C reaches all processes of a terminal at once."""
    words = [*SPLIT, "--workers", 2, "--out", tmp_path / "x"]
    process = subprocess.Popen(
        command(*words), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    wait_for_units(tmp_path / "x", 1, process)
    if moment == signal.SIGINT:
        os.killpg(process.pid, moment)
    else:
        process.kill()
    _, said = process.communicate(timeout=200)
    if moment == signal.SIGINT:
        assert process.returncode == 130
        assert said.endswith("tokensteer: stopped; what was finished is kept\n"), said
    assert list((tmp_path / "x" / "units").glob("*.safetensors")) or ts.open_run(tmp_path / "x").rows
    done = subprocess.run(command(*words, "--resume"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "x") == uninterrupted
