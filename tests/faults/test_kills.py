"""Commands killed at random moments: `tests/faults/kills.py` kills, resumes and compares them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def kill(*words: str, module: str = "kills") -> None:
    """In a process of its own: children that are forked from one that has computed gradients cannot compute any."""
    command = [sys.executable, "-m", f"tests.faults.{module}", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_few_kills_at_random_moments() -> None:
    kill("--count", "3", "--seed", "2", "--only", "compare")


@pytest.mark.slow
def test_fifty_kills_at_random_moments() -> None:
    kill("--count", "50", "--seed", "1")


@pytest.mark.slow
def test_kills_of_runs_on_ray_workers_and_of_the_workers() -> None:
    """One of each kind: `run` and `compare`, here and on a cluster, the run itself and a worker."""
    pytest.importorskip("ray")
    kill("--count", "8", "--seed", "2", module="ray_kills")
