"""Rows of results as tables and lines for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tokensteer.app.runs.seeds import over_seeds, seeds_of
from tokensteer.app.words import metrics
from tokensteer.app.words.numbers import NOTHING, loaded_pair, short, with_error
from tokensteer.app.words.plans import PILOTED, by_title, compared

WIDTH = 80
Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]
"""A title, and the text of a row's cell."""


def plain_console(width: int | None = None, stderr: bool = False) -> Console:
    """A console that prints text as it is: names and prompts may look like markup or emoji."""
    return Console(width=width, stderr=stderr, markup=False, emoji=False, highlight=False)


def terminal() -> Console:
    """The standard output stream; 80 columns for a file."""
    console = plain_console()
    return console if console.is_terminal else plain_console(width=WIDTH)


def say(part: str | Table | Text, console: Console | None = None) -> None:
    """Print a table or a text of several styles within the columns of the console, and a string as one line."""
    (console or terminal()).print(part, soft_wrap=isinstance(part, str))


def tables(rows: Sequence[Row], width: int) -> list[str | Table]:
    """For each task a heading and one table that fits into `width` columns, and what was left out of it. Rows that
    differ in their seed only are joined."""
    found: list[str | Table] = []
    for task in dict.fromkeys(row["task"] for row in rows):
        here = [row for row in rows if row["task"] == task]
        joined = over_seeds(here)
        columns = [*_metrics(here), LOG_Z, *COST]
        kept = _fitting(joined, columns, width)
        found += [_heading(here, joined), _table(joined, kept)]
        out = [title.replace("\n", " ") for title, cell in columns if (title, cell) not in kept]
        out += ["the best of N by reward"] if any(row["best"] for row in joined) else []
        out += ["single seeds"] if len(joined) < len(here) else []
        found += [f"In results.json and the report: {', '.join(out)}"] if out else []
    return found


def _fitting(rows: Sequence[Row], columns: Sequence[Column], width: int) -> list[Column]:
    """The most important columns that fit into `width`, in their order."""
    console, kept = plain_console(width=1000), list[Column]()
    for column in sorted(columns, key=lambda column: _rank(column[0])):
        more = [one for one in columns if one in kept or one == column]
        if console.measure(_table(rows, more)).maximum <= width:
            kept = more
    return kept


def _rank(title: str) -> int:
    """The place of a column among those that have to fit, 0 for the most important."""
    first = ("EMD", "TV", "accuracy", "activity", "reward", "log Z", "ESS/N", SECONDS, DENOISER, REWARD)
    return first.index(title) if title in first else len(first)


def _heading(rows: Sequence[Row], joined: Sequence[Row]) -> str:
    first = rows[0]
    exact = first["metrics"].get("exact log_z")
    known = f" Exact log Z = {exact[0]:.4f}." if exact else ""
    if len(joined) < len(rows):
        over = f"{' or '.join(str(n) for n in dict.fromkeys(map(seeds_of, joined)))} seeds"
    else:
        many = list(dict.fromkeys(row["populations"] for row in rows))
        over = f"{' and '.join(map(str, many))} population{'' if many == [1] else 's'}"
    return f"{first['task']}: {first['about']}. Means ± standard errors over {over}.{known}"


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    """Method, number of particles and the columns."""
    shown: list[Column] = [("method", lambda row: row["method"]), ("N", lambda row: f"{row['particles']:,}"), *columns]
    drawn = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title, _ in shown:
        name = title == "method"  # a long one is broken
        drawn.add_column(title, justify="left" if name else "right", vertical="bottom", no_wrap=not name)
    for row in rows:
        drawn.add_row(*(cell(row) for _, cell in shown))
    return drawn


def _metrics(rows: Sequence[Row]) -> list[Column]:
    """A column for each metric of any row."""

    def column(name: str) -> Column:
        return metrics.title(name).replace(" ", "\n"), lambda row: spread(row["metrics"].get(name))

    return [column(name) for name in metrics.columns(row["metrics"] for row in rows)]


def _denoiser(row: Row) -> str:
    """Denoiser rows computed, and those needed if some of them were saved."""
    rows, saved = row["rows"].get("denoiser", 0), row["saved"].get("denoiser", 0)
    return f"{_count(rows)}/{_count(rows + saved)}" if saved else _count(rows)


def _count(rows: int) -> str:
    return short(rows) if rows else NOTHING


DENOISER, REWARD, SECONDS = "denoiser\nrows", "reward\nrows", "s"
LOG_Z: Column = ("log Z", lambda row: spread([row["log_z"], row["log_z_error"]]))
COST: list[Column] = [
    (DENOISER, _denoiser),
    (REWARD, lambda row: _count(row["rows"].get("reward", 0))),
    (SECONDS, lambda row: f"{row['seconds']:.1f}"),
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
        found.append(f"Chosen for {title}:" + (f" {PILOTED}" if compared(reasons) else ""))
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
