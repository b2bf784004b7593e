"""The config of a run folder."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import torch

import tokensteer
from tokensteer.app.runs.folder import FORMAT
from tokensteer.app.runs.jobs import Job
from tokensteer.app.runs.prepare import Environment
from tokensteer.app.runs.resume import inputs
from tokensteer.app.words.environment import versions
from tokensteer.tasks.common.task import SHIPPED


def config(
    command: str, jobs: Sequence[Job], place: Environment, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Everything needed to run it again. `options` are those of the command that decide the results."""
    here = place.here.device
    return {
        "format": FORMAT,
        "version": tokensteer.__version__,
        "command": command,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "weights": "shipped" if place.weights == SHIPPED else str(place.weights),
        "device": place.device,
        **({} if place.memory is None else {"memory": place.memory}),
        "machine": torch.cuda.get_device_name(here) if here.startswith("cuda") else platform.machine(),
        "versions": versions(),
        "inputs": inputs(jobs, place),
        **({} if options is None else {"options": dict(options)}),
        "jobs": [job.stored() for job in jobs],
    }
