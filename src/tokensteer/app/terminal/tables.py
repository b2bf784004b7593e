"""Rows of results as tables for a terminal: posterior draws first, the best by reward apart from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tokensteer.app.runs.seeds import over_seeds, seeds_of
from tokensteer.app.words import numbers
from tokensteer.tasks.common.metrics import Measured

Row = Mapping[str, Any]


Column = tuple[str, Callable[[Row], str]]
"""A title, and what stands below it for a row."""


ELSEWHERE = ("exact log_z",)
"""Metrics that are said above the table."""


OF_MANY = ("ess", "diversity", "distinct-1", "distinct-2", "distinct-3", "self-BLEU", *ELSEWHERE)
"""Metrics that mean nothing, or nothing new, for the best of each population."""


def plain_console(width: int | None = None, stderr: bool = False) -> Console:
    """A console that prints text as it is: names and prompts may look like markup or like emoji."""
    return Console(width=width, stderr=stderr, markup=False, emoji=False, highlight=False)


def tables(rows: Sequence[Row], width: int) -> list[str | Table]:
    """For each task a heading and its tables, for a terminal of so many columns."""
    found: list[str | Table] = []
    for task in dict.fromkeys(row["task"] for row in rows):
        here = [row for row in rows if row["task"] == task]
        columns = [*metrics(here, "metrics", ELSEWHERE), LOG_Z, *COST]
        found += [heading(here), *fitted(here, columns, width)]
        joined = over_seeds(here)
        if len(joined) < len(here):
            sizes = " or ".join(str(n) for n in dict.fromkeys(map(seeds_of, joined)))
            found += [f"Means ± standard errors over {sizes} seeds", *fitted(joined, columns, width)]
        judged = [row for row in joined if row["best"]]
        if judged:
            found.append("Best of N by reward, which is no draw from the target")
            found += fitted(judged, metrics(judged, "best", OF_MANY), width)
    return found


def fitted(rows: Sequence[Row], columns: Sequence[Column], width: int) -> list[Table]:
    """One table, or as many below each other as the width asks for."""
    console, fit = plain_console(width=1000), 1
    while fit < len(columns) and console.measure(table(rows, columns[: fit + 1])).maximum <= width:
        fit += 1
    rest = fitted(rows, columns[fit:], width) if fit < len(columns) else []
    return [table(rows, columns[:fit]), *rest]


def heading(rows: Sequence[Row]) -> str:
    first = rows[0]
    exact = first["metrics"].get("exact log_z")
    known = f" Exact log Z = {exact[0]:.4f}." if exact else ""
    sizes = " and ".join(f"{n}" for n in dict.fromkeys(row["populations"] for row in rows))
    return f"{first['task']}: {first['about']}. Means ± standard errors over {sizes} populations.{known}"


def table(rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    """Who, with so many particles, and the columns."""
    seeds = len({row["seed"] for row in rows}) > 1
    who: list[Column] = [("method", lambda row: row["method"]), ("N", lambda row: f"{row['particles']:,}")]
    shown = [*who, *([("seed", _seed)] if seeds else []), *columns]
    drawn = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title, _ in shown:
        left = title == "method"
        drawn.add_column(title, justify="left" if left else "right", vertical="bottom", no_wrap=True)
    for row in rows:
        drawn.add_row(*(cell(row) for _, cell in shown))
    return drawn


def metrics(rows: Sequence[Row], key: str, without: Sequence[str]) -> list[Column]:
    """A column for each metric of any row."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row[key]) if name not in without]
    return [_metric(key, name) for name in names]


def _metric(key: str, name: str) -> Column:
    title = {"emd": "EMD", "ess": "ESS/N"}.get(name, name.replace(" ", "\n"))
    return title, lambda row: spread(row[key].get(name))


def _asked(row: Row) -> str:
    """Denoiser rows computed, of those asked for where some were known already."""
    rows, saved = row["rows"].get("denoiser", 0), row["saved"].get("denoiser", 0)
    return f"{_count(rows)}/{_count(rows + saved)}" if saved else _count(rows)


def _seed(row: Row) -> str:
    return str(row["seed"])


def _seconds(row: Row) -> str:
    return f"{row['seconds']:.1f}"


LOG_Z: Column = ("log Z", lambda row: spread([row["log_z"], row["log_z_error"]]))


COST: list[Column] = [
    ("denoiser rows\ncomputed/asked", _asked),
    ("reward rows\ncomputed", lambda row: _count(row["rows"].get("reward", 0))),
    ("s", _seconds),
]


def summary(row: Row) -> str:
    """A row in a line."""
    marks = [f"{name} {spread(value)}" for name, value in row["metrics"].items() if name not in ELSEWHERE]
    marks += [f"{row['dead']} of {row['populations']} populations died"] if "dead" in row else []
    return f"{row['task']} {row['method']}, N = {row['particles']}: {', '.join(marks)}, {_seconds(row)} s"


def spread(value: Sequence[float | None] | None) -> str:
    """A mean with its standard error; a dash for what is not known."""
    mean, error = (math.nan if number is None else number for number in value or (None, None))
    return "±".join(part for part in numbers.spread(Measured(mean, error)) if part)


def _count(rows: int) -> str:
    """A dash for nothing."""
    return numbers.short(rows) if rows else numbers.NOTHING


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each prompt that gave nothing, whatever the method."""
    every = [failed for row in rows for failed in row.get("failed", ())]
    return list(dict.fromkeys(f"prompt {failed['id']} failed: {failed['error']}" for failed in every))


def deaths(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each row of which populations died, with the mend."""
    mend = "no particle kept any weight. Use more particles, resample earlier, or soften the reward"
    return [f"{_who(row)}: {row['dead']} of {row['populations']} {_died(row)}: {mend}" for row in rows if "dead" in row]


def _who(row: Mapping[str, Any]) -> str:
    return f"{row['method']}, N = {row['particles']}, seed {row['seed']}"


def _died(row: Mapping[str, Any]) -> str:
    prompts = row.get("dead prompts", ())
    return "populations died" + (f", all of prompt {', '.join(prompts)}" if prompts else "")


def terminal() -> Console:
    """The standard output stream; a file has no edge to wrap at."""
    console = plain_console()
    return console if console.is_terminal else plain_console(width=200)


def say(part: str | Table, console: Console | None = None) -> None:
    (console or terminal()).print(part, soft_wrap=isinstance(part, str))
