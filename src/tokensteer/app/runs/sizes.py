"""Refusing sizes that cannot fit into memory, before anything is run."""

from __future__ import annotations

import torch
from torch import nn

from tokensteer.app.runs.prepare import Environment, PreparedJob
from tokensteer.app.runs.units import Unit
from tokensteer.core.models.denoiser import FromHidden
from tokensteer.core.numerics.batching import physical_memory

ID = 8
"""Bytes of a token id and of an ancestor."""


def check_fits(ready: PreparedJob, place: Environment, unit: Unit) -> None:
    """Raise ValueError if a unit of a job needs more memory than the device has, by an estimate that is too low
    rather than too high: for each particle one prediction, its ids twice (L,), and an ancestor for each step. A
    prediction is a table (L, V), or (L, D) hidden units. What networks take on the way comes on top, and is bounded by
    --memory. What the machines of a cluster have is not known here."""
    if place.here.device != place.device:
        return
    job, model = unit.job, ready.task.model
    populations = job.populations * (ready.method.steering.resources.templates if unit.prompt is None else 1)
    length, head = model.template.shape[-1], model.denoiser.head if isinstance(model.denoiser, FromHidden) else None
    width, what = model.vocab_size, "tokens"
    if isinstance(head, nn.Linear) and head.in_features < width:
        width, what = head.in_features, "hidden units"
    each = length * width * model.dtype.itemsize + 2 * length * ID + len(model.steps) * ID
    needed, there = job.particles * populations * each, _memory(place.device)
    if needed > there:
        most = there // (populations * each)
        mend = f"use at most {most:,} --particles, or fewer --populations" if most else "use fewer --populations"
        raise ValueError(
            f"{job.label} needs at least {_gib(needed)}, and {place.device} has {_gib(there)}: {job.particles:,} "
            f"particles x {populations:,} populations x {length:,} sites x {width:,} {what}; {mend}"
        )


def _memory(device: str) -> int:
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return physical_memory()


def _gib(size: int) -> str:
    return f"{size / 2**30:,.3g} GiB" if size < 1000 * 2**30 else f"{size / 2**30:,.0f} GiB"
