"""A live Ray cluster of two nodes, started by `ray start` as on two machines."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.kills import content
from tests.helpers.ray_cluster import Cluster, cluster, descendants, named

pytest.importorskip("ray")
SOURCE = str(Path(__file__).parents[2] / "src")
COMPARE = ["compare", "digits", "--methods", "smc-base", "svdd", "--particles", "8", "--populations", "4"]
COMPARE += ["--steps", "40", "--seeds", "0", "1", "--islands", "4"]
LIMIT = 300.0


def started(nodes: Cluster, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tokensteer", *map(str, words)],
        env={**nodes.environment, "PYTHONPATH": SOURCE},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, said
    return said


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    with cluster(2, PYTHONPATH=SOURCE) as started:
        yield started


@pytest.fixture(scope="module")
def alone(nodes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process writes."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    ended(started(nodes, *COMPARE, "--out", folder))
    return content(folder)


def at_work(node: int) -> bool:
    """Whether a worker of a node runs a unit; Ray calls processes after what they do."""
    return any(named(each).startswith("ray::Actor.call") for each in descendants(node))


@pytest.mark.slow
def test_the_second_node_is_killed_halfway(nodes: Cluster, alone: dict[str, Any], tmp_path: Path) -> None:
    """Without `--workers` each of the two nodes gets one. The cluster is found by itself."""
    second = nodes.nodes[1]
    process = started(nodes, *COMPARE, "--ray", "auto", "--out", tmp_path / "x")
    limit = time.monotonic() + LIMIT
    done = tmp_path / "x" / "rows"
    while len(list(done.glob("*.safetensors"))) < 2 or not at_work(second.process.pid):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit, "it takes too long"
        time.sleep(0.01)
    second.kill()
    ended(process)
    assert content(tmp_path / "x") == alone


@pytest.mark.slow
def test_a_cluster_at_an_address_gives_the_results_of_one_process(
    nodes: Cluster, alone: dict[str, Any], tmp_path: Path
) -> None:
    """With more workers than there is room for: the others start when there is."""
    ended(started(nodes, *COMPARE, "--ray", nodes.address, "--workers", 3, "--out", tmp_path / "x"))
    assert content(tmp_path / "x") == alone


@pytest.mark.slow
def test_a_cluster_without_the_library_says_so(tmp_path: Path) -> None:
    broken = tmp_path / "tokensteer"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ModuleNotFoundError('tokensteer is not installed here')\n")
    with cluster(1, PYTHONPATH=str(tmp_path)) as bare:
        process = started(bare, *COMPARE, "--ray", bare.address, "--out", tmp_path / "x")
        said, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 2
    assert "no worker can be started (ModuleNotFoundError: tokensteer is not installed here)" in said
    assert "the same versions of Python, Ray and tokensteer on every machine" in said
