"""The numbers of every named method on every shipped task, as hashes: a change of structure leaves them as they are.

They are those of one kind of processor, since others round otherwise. After a deliberate change of numbers write them
anew with `python tests/exactness/test_same_numbers.py`, and say so in the CHANGELOG.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tokensteer as ts

TABLE = Path(__file__).with_name("same_numbers.json")
RUNS = {
    "mog": "mog --particles 20 --steps 12",
    "mog-enumerated": "mog --methods smc-enumerated particle-gibbs svdd-argmax --particles 20 --steps 12",
    "digits": "digits --steps 10",
    "digits-remasked": "digits --methods smc-base smc-grad particle-gibbs svdd-argmax --steps 10 --remask 0.1",
    "digits-adaptive": "digits --methods smc-base smc-grad --steps 10 --ramp adaptive:0.9 --noise fresh",
    "mnist": "mnist --steps 5",
    "text": "text --steps 5 --prompts PROMPTS",
    "dna": "dna --steps 5",
}


def hashes(name: str, folder: Path) -> dict[str, str]:
    """A hash of the samples, weights, rewards and ancestors of each row of a comparison."""
    words = f"compare {RUNS[name]} --populations 2 --seeds 3 --out {folder / name}"
    if "--particles" not in words:
        words += " --particles 4"
    prompts = folder / "prompts.txt"
    prompts.write_text("the film is ____\n")
    words = words.replace("PROMPTS", str(prompts))
    command = [sys.executable, "-c", "from tokensteer.app.cli import run; run()", *words.split()]
    subprocess.run(command, check=True, capture_output=True, env={"OMP_NUM_THREADS": "1", "PATH": "", **_environment()})
    run = ts.open_run(folder / name)
    found: dict[str, str] = {}
    for k, row in enumerate(run.rows):
        result = run.result(k)
        tensors = (result.samples, result.log_w, result.reward, result.ess, result.ancestors)
        content = b"".join(b"-" if value is None else value.numpy().tobytes() for value in tensors)
        found[f"{name}/{row['method']}"] = hashlib.sha256(content).hexdigest()[:16]
    return found


def _environment() -> dict[str, str]:
    import os

    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def processor() -> str:
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__.split('+')[0]}"


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_numbers_are_those_of_before(name: str, tmp_path: Path) -> None:
    table = json.loads(TABLE.read_text())
    if table["processor"] != processor():
        pytest.skip(f"the table is of {table['processor']}, and this is {processor()}")
    expected = {key: value for key, value in table["hashes"].items() if key.split("/")[0] == name}
    assert hashes(name, tmp_path) == expected


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        found = {key: value for name in RUNS for key, value in hashes(name, Path(place)).items()}
    TABLE.write_text(json.dumps({"processor": processor(), "hashes": found}, indent=1) + "\n")
