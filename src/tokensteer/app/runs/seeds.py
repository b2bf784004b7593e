"""Rows that differ in their seed alone, as one row.

Each seed is a run of its own, so its mean is one independent value: metrics are means over seeds with the standard
error of those. Estimates of Z are unbiased, and their logs are not, so log Z is the log of the mean of Z.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tokensteer.core.particles.result import pooled
from tokensteer.tasks.common.metrics import Measured, measured

Row = Mapping[str, Any]
Numbers = list[float | None]
"""A mean and its standard error as they are stored: null for what is not known."""


def over_seeds(rows: Sequence[Row]) -> list[Row]:
    """One row for each task, method and size, in the order of the first of each; `seeds` says how many made it."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["method"], row["particles"], row["populations"]), []).append(row)
    return [_merged(group) if len(group) > 1 else group[0] for group in groups.values()]


def seeds_of(row: Row) -> int:
    return int(row.get("seeds", 1))


def _merged(group: Sequence[Row]) -> Row:
    first = group[0]
    log_z = _joined([row["log_z"] for row in group], _pooled)
    return {
        **first,
        "seeds": len(group),
        "metrics": _metrics([row["metrics"] for row in group]),
        "best": _metrics([row["best"] for row in group]) if all(row.get("best") for row in group) else None,
        "log_z": log_z[0],
        "log_z_error": log_z[1],
        "rows": _counts([row["rows"] for row in group]),
        "saved": _counts([row["saved"] for row in group]),
        "seconds": sum(row["seconds"] for row in group) / len(group),
        **({"dead": dead} if (dead := sum(row.get("dead", 0) for row in group)) else {}),
    }


def _metrics(found: Sequence[Mapping[str, Numbers]]) -> dict[str, Numbers]:
    names = [name for name in found[0] if all(name in metrics for metrics in found)]
    return {name: _joined([metrics[name][0] for metrics in found], measured) for name in names}


def _joined(values: Sequence[float | None], join: Callable[[torch.Tensor], Measured]) -> Numbers:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return [None, None]
    joined = join(torch.tensor(known, dtype=torch.float64))
    return [value if math.isfinite(value) else None for value in (joined.mean, joined.error)]


def _pooled(log_z: torch.Tensor) -> Measured:
    return Measured(*pooled(log_z))


def _counts(found: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Rows of one seed, on average."""
    names = dict.fromkeys(name for counts in found for name in counts)
    return {name: round(sum(counts.get(name, 0) for counts in found) / len(found)) for name in names}
