"""Rows of results as tables and lines for a terminal. The best by reward has a table apart from posterior draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tokensteer.app.runs.seeds import over_seeds, seeds_of
from tokensteer.app.words import metrics
from tokensteer.app.words.numbers import NOTHING, loaded_pair, short, with_error
from tokensteer.app.words.plans import PILOTED, by_title, of_pilots

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]
"""A title, and the text of a row's cell."""


def plain_console(width: int | None = None, stderr: bool = False) -> Console:
    """A console that prints text as it is: names and prompts may look like markup or emoji."""
    return Console(width=width, stderr=stderr, markup=False, emoji=False, highlight=False)


def terminal() -> Console:
    """The standard output stream; a file is not wrapped at 80 columns."""
    console = plain_console()
    return console if console.is_terminal else plain_console(width=200)


def say(part: str | Table, console: Console | None = None) -> None:
    (console or terminal()).print(part, soft_wrap=isinstance(part, str))


def tables(rows: Sequence[Row], width: int) -> list[str | Table]:
    """A heading and tables for each task, for a terminal of `width` columns."""
    found: list[str | Table] = []
    for task in dict.fromkeys(row["task"] for row in rows):
        here = [row for row in rows if row["task"] == task]
        columns = [*_metrics(here, "metrics"), LOG_Z, *COST]
        found += [_heading(here), *_fitted(here, columns, width)]
        joined = over_seeds(here)
        if len(joined) < len(here):
            sizes = " or ".join(str(n) for n in dict.fromkeys(map(seeds_of, joined)))
            found += [f"Means ± standard errors over {sizes} seeds", *_fitted(joined, columns, width)]
        judged = [row for row in joined if row["best"]]
        if judged:
            found.append("Best of N by reward, which is no draw from the target")
            found += _fitted(judged, _metrics(judged, "best"), width)
    return found


def _fitted(rows: Sequence[Row], columns: Sequence[Column], width: int) -> list[Table]:
    """One table, or several below each other if one would be too wide."""
    console, fit = plain_console(width=1000), 1
    while fit < len(columns) and console.measure(_table(rows, columns[: fit + 1])).maximum <= width:
        fit += 1
    rest = _fitted(rows, columns[fit:], width) if fit < len(columns) else []
    return [_table(rows, columns[:fit]), *rest]


def _heading(rows: Sequence[Row]) -> str:
    first = rows[0]
    exact = first["metrics"].get("exact log_z")
    known = f" Exact log Z = {exact[0]:.4f}." if exact else ""
    sizes = " and ".join(f"{n}" for n in dict.fromkeys(row["populations"] for row in rows))
    return f"{first['task']}: {first['about']}. Means ± standard errors over {sizes} populations.{known}"


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    """Method, number of particles, seed where it differs, and the columns."""
    shown: list[Column] = [("method", lambda row: row["method"]), ("N", lambda row: f"{row['particles']:,}")]
    if len({row["seed"] for row in rows}) > 1:
        shown.append(("seed", lambda row: str(row["seed"])))
    shown += columns
    drawn = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title, _ in shown:
        drawn.add_column(title, justify="left" if title == "method" else "right", vertical="bottom", no_wrap=True)
    for row in rows:
        drawn.add_row(*(cell(row) for _, cell in shown))
    return drawn


def _metrics(rows: Sequence[Row], key: str) -> list[Column]:
    """A column for each metric of any row; `key` is "metrics" or "best"."""

    def column(name: str) -> Column:
        return metrics.title(name).replace(" ", "\n"), lambda row: spread(row[key].get(name))

    return [column(name) for name in metrics.columns((row[key] for row in rows), of_best=key == "best")]


def _denoiser(row: Row) -> str:
    """Denoiser rows computed, and those needed if some of them were saved."""
    rows, saved = row["rows"].get("denoiser", 0), row["saved"].get("denoiser", 0)
    return f"{_count(rows)}/{_count(rows + saved)}" if saved else _count(rows)


def _count(rows: int) -> str:
    return short(rows) if rows else NOTHING


LOG_Z: Column = ("log Z", lambda row: spread([row["log_z"], row["log_z_error"]]))
COST: list[Column] = [
    ("denoiser rows\ncomputed/needed", _denoiser),
    ("reward rows\ncomputed", lambda row: _count(row["rows"].get("reward", 0))),
    ("s", lambda row: f"{row['seconds']:.1f}"),
]


def spread(stored: Sequence[float | None] | None) -> str:
    """A stored mean with its standard error; a dash if it is unknown."""
    return with_error(loaded_pair(stored or (None, None)), "±")


def summary(row: Row) -> str:
    """A row in a line."""
    marks = [f"{name} {spread(row['metrics'][name])}" for name in metrics.columns([row["metrics"]])]
    marks += [f"{row['dead']} of {row['populations']} populations died"] if "dead" in row else []
    return f"{row['task']} {row['method']}, N = {row['particles']}: {', '.join(marks)}, {row['seconds']:.1f} s"


def plans(rows: Sequence[Row]) -> list[str]:
    """What pilots or timing chose, a line for each choice with its reason."""
    found: list[str] = []
    for title, reasons in by_title((row["method"], row["seed"], row.get("plan", {})) for row in rows).items():
        found.append(f"Chosen for {title}:" + (f" {PILOTED}" if of_pilots(reasons) else ""))
        found += [f"  {name:<9} {reason}" for name, reason in reasons.items()]
    return found


def learned_elsewhere(rows: Sequence[Row]) -> list[str]:
    """A line for each method whose networks were learned for another reward."""
    found: dict[str, None] = {}
    for row in rows:
        if "learned for" in row:
            weighted = row.get("answer") != "unweighted"
            effect = "its weights correct for that" if weighted else "no weights correct for that"
            found[f"{row['method']}: its networks were learned for {row['learned for']}; {effect}"] = None
    return list(found)


def failures(rows: Sequence[Row]) -> list[str]:
    """A line for each prompt that failed with some method."""
    every = [failed for row in rows for failed in row.get("failed", ())]
    return list(dict.fromkeys(f"prompt {failed['id']} failed: {failed['error']}" for failed in every))


def deaths(rows: Sequence[Row]) -> list[str]:
    """A line for each row with dead populations, with the mend."""
    mend = "no particle kept any weight. Use more particles, resample earlier, or soften the reward"
    found: list[str] = []
    for row in rows:
        if "dead" in row:
            who = f"{row['method']}, N = {row['particles']}, seed {row['seed']}"
            prompts = row.get("dead prompts", ())
            lost = f", all of prompt {', '.join(prompts)}" if prompts else ""
            found.append(f"{who}: {row['dead']} of {row['populations']} populations died{lost}: {mend}")
    return found
