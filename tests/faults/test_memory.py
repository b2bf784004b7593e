"""Memory over many runs in one process: `tests/faults/memory.py` runs and measures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.memory import growth

ROOT = Path(__file__).parents[2]


def test_runs_leave_no_tensor_behind() -> None:
    before, after = growth(40, plans=8)
    assert after.tensors <= before.tensors


@pytest.mark.slow
def test_resident_memory_is_flat_over_a_thousand_runs() -> None:
    """In a process of its own, where nothing else is freed meanwhile."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.faults.memory", "--count", "1000"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
