"""`tokensteer doctor`: what is there, what is not, and how to get it."""

from __future__ import annotations

import os
import platform

import torch

from tokensteer.app.words.environment import EXTRAS, NEEDED, installed, versions
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.task import SHIPPED, Setup, data_folder


def doctor() -> int:
    for part in (_packages(), _devices(), _extras(), _data(), _weights()):
        for name, what in part:
            print(f"{name:<12} {what}")
    return 0


def _packages() -> list[tuple[str, str]]:
    here = versions()
    return [(name, here[name] or "missing") for name in ("tokensteer", "python", *NEEDED)]


def _devices() -> list[tuple[str, str]]:
    found = [("cpu", f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()}; {platform.machine()}")]
    if not torch.cuda.is_available():
        return [*found, ("cuda", "torch sees no GPU")]
    for k in range(torch.cuda.device_count()):
        gib = torch.cuda.mem_get_info(k)[1] / 2**30
        found.append((f"cuda:{k}", f"{torch.cuda.get_device_name(k)}, {gib:.0f} GiB"))
    return found


def _extras() -> list[tuple[str, str]]:
    missing = "not installed, for {}: pip install 'tokensteer[{}]'"
    return [(name, installed(name) or missing.format(use, extra)) for name, extra, use in EXTRAS]


def _data() -> list[tuple[str, str]]:
    files = {name: data_folder() / task.data for name, task in TASKS.items() if task.data is not None}
    missing = "not there, needed to train {}: set TOKENSTEER_DATA to the folder that has it"
    return [("data", f"{file}: {'found' if file.is_file() else missing.format(task)}") for task, file in files.items()]


def _weights() -> list[tuple[str, str]]:
    return [(name, _weight(name)) for name in TASKS]


def _weight(name: str) -> str:
    """Whether the task can be run, found out by making it."""
    try:
        TASKS[name].make(Setup(steps=1))
    except (OSError, ValueError) as error:
        return f"cannot be run: {error}"
    size = sum(file.stat().st_size for file in SHIPPED.glob(f"{name}-*.safetensors"))
    return f"ready, {size / 2**20:.1f} MiB of weights shipped"
