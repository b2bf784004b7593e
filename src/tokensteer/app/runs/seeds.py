"""Rows that differ only in their seed, merged into one row.

The mean of each seed is one independent value: a metric is the mean over seeds, with the standard error of that mean.
Estimates of Z are unbiased and their logs are not, so log Z is the log of the mean of Z.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tokensteer.app.words.numbers import stored
from tokensteer.core.particles.result import pooled
from tokensteer.tasks.common.metrics import Measured, measured

Row = Mapping[str, Any]
Numbers = list[float | None]
"""A mean and its standard error as they are stored, null if unknown."""


def over_seeds(rows: Sequence[Row]) -> list[Row]:
    """One row for each task, method and size, in the order of the first of each; `seeds` counts the merged rows."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["method"], row["particles"], row["populations"]), []).append(row)
    return [_merged(group) if len(group) > 1 else group[0] for group in groups.values()]


def seeds_of(row: Row) -> int:
    return int(row.get("seeds", 1))


def _merged(group: Sequence[Row]) -> Row:
    log_z = _joined([row["log_z"] for row in group], lambda values: Measured(*pooled(values)))
    return {
        **group[0],
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
    return stored(join(torch.tensor(known, dtype=torch.float64)))


def _counts(found: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The mean number of network rows over seeds."""
    names = dict.fromkeys(name for counts in found for name in counts)
    return {name: round(sum(counts.get(name, 0) for counts in found) / len(found)) for name in names}
