"""`tokensteer doctor`: which packages, devices, data and weights there are, and how to get the others."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

import torch

from tokensteer.app.options import Doctor, Outcome
from tokensteer.app.words.environment import EXTRAS, NEEDED, installed, versions
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.task import SHIPPED, Setup, data_folder


def main(command: Doctor, words: str) -> Outcome:
    found = [*_machine(), *_tasks()]
    for name, what in found:
        print(f"{name:<12} {what}")
    return {"found": [{"name": name, "what": what} for name, what in found]}


def _machine() -> Iterator[tuple[str, str]]:
    """Packages and devices."""
    here = versions()
    for name in ("tokensteer", "python", *NEEDED):
        yield name, here[name] or "missing"
    yield "cpu", f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()}; {platform.machine()}"
    if not torch.cuda.is_available():
        yield "cuda", "torch sees no GPU"
    for k in range(torch.cuda.device_count()):
        gib = torch.cuda.mem_get_info(k)[1] / 2**30
        yield f"cuda:{k}", f"{torch.cuda.get_device_name(k)}, {gib:.0f} GiB"
    for name, extra, use in EXTRAS:
        yield name, installed(name) or f"not installed, for {use}: pip install 'tokensteer[{extra}]'"


def _tasks() -> Iterator[tuple[str, str]]:
    """Data for training, and whether each task can be run, tested by making it."""
    for name, task in TASKS.items():
        if task.data is not None:
            file = data_folder() / task.data
            missing = f"not there, needed to train {name}: set TOKENSTEER_DATA to the folder that has it"
            yield "data", f"{file}: {'found' if file.is_file() else missing}"
    for name, task in TASKS.items():
        try:
            task.make(Setup(steps=1))
        except (OSError, ValueError) as error:
            yield name, f"cannot be run: {error}"
            continue
        size = sum(file.stat().st_size for file in SHIPPED.glob(f"{name}-*.safetensors"))
        yield name, f"ready, {size / 2**20:.1f} MiB of weights shipped" if size else "ready, needs no weights"
