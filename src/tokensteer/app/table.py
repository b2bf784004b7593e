"""Rows of results as tables for a terminal: posterior draws first, the best by reward apart from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

Row = Mapping[str, Any]

ELSEWHERE = ("exact log_z",)
"""Metrics that are said above the table."""
OF_MANY = ("ess", "diversity", *ELSEWHERE)
"""Metrics that mean nothing, or nothing new, for the best of each population."""


def tables(rows: Sequence[Row]) -> list[str | Table]:
    """For each task a heading and its tables."""
    found: list[str | Table] = []
    for task in dict.fromkeys(row["task"] for row in rows):
        here = [row for row in rows if row["task"] == task]
        found.append(heading(here))
        found.append(posterior(here))
        if any(row["best"] for row in here):
            found += ["Best of N by reward, which is no draw from the target", best(here)]
    return found


def heading(rows: Sequence[Row]) -> str:
    first = rows[0]
    exact = first["metrics"].get("exact log_z")
    known = f" Exact log Z = {exact[0]:.4f}." if exact else ""
    sizes = " and ".join(f"{n}" for n in dict.fromkeys(row["populations"] for row in rows))
    return f"{first['task']}: {first['about']}. Means ± standard errors over {sizes} populations.{known}"


def posterior(rows: Sequence[Row]) -> Table:
    names = _names(rows, "metrics", ELSEWHERE)
    table = _table(rows, [*(_title(name) for name in names), "log Z", "denoiser\nrows", "reward\nrows", "s"])
    for row in rows:
        marks = [spread(row["metrics"].get(name)) for name in names]
        cost = [short(row["rows"].get(name, 0)) for name in ("denoiser", "reward")]
        table.add_row(*_who(rows, row), *marks, spread([row["log_z"], row["log_z_error"]]), *cost, _seconds(row))
    return table


def best(rows: Sequence[Row]) -> Table:
    rows = [row for row in rows if row["best"]]
    names = _names(rows, "best", OF_MANY)
    table = _table(rows, [_title(name) for name in names])
    for row in rows:
        table.add_row(*_who(rows, row), *(spread(row["best"].get(name)) for name in names))
    return table


def summary(row: Row) -> str:
    """A row in a line."""
    marks = [f"{name} {spread(value)}" for name, value in row["metrics"].items() if name not in ELSEWHERE]
    return f"{row['task']} {row['method']}, N = {row['particles']}: {', '.join(marks)}, {_seconds(row)} s"


def _table(rows: Sequence[Row], headings: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("method", vertical="bottom")
    for title in ["N", *(["seed"] if _seeds(rows) else []), *headings]:
        table.add_column(title, justify="right", vertical="bottom", no_wrap=True)
    return table


def _who(rows: Sequence[Row], row: Row) -> list[str]:
    return [row["method"], f"{row['particles']:,}", *([str(row["seed"])] if _seeds(rows) else [])]


def _seeds(rows: Sequence[Row]) -> bool:
    return len({row["seed"] for row in rows}) > 1


def _names(rows: Sequence[Row], key: str, without: Sequence[str]) -> list[str]:
    return [name for name in dict.fromkeys(name for row in rows for name in row[key]) if name not in without]


def _title(name: str) -> str:
    return {"emd": "EMD", "ess": "ESS/N"}.get(name, name.replace(" ", "\n"))


def _seconds(row: Row) -> str:
    return f"{row['seconds']:.1f}"


def spread(value: Sequence[float | None] | None) -> str:
    """A mean with as many places as its standard error bears; a dash for what is not known."""
    mean, error = value or (None, None)
    if mean is None:
        return "-"
    if not error:
        return f"{mean:.3g}" if error is None else f"{mean:.4g}"
    places = min(4, max(0, 1 - math.floor(math.log10(error))))
    return f"{mean:.{places}f}±{error:.{places}f}"


def short(count: int) -> str:
    """A count in few places: 950, 2.0k, 200k, 2.0M; a dash for nothing."""
    unit, size = ("M", 1e6) if count >= 999_500 else ("k", 1e3) if count >= 1000 else ("", 1.0)
    return f"{count / size:.{1 if unit and count < 10 * size else 0}f}{unit}" if count else "-"
