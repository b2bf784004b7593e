"""The table of methods, which sorts by any column."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tokensteer.app.report.charts import swatch
from tokensteer.app.report.folder import Row
from tokensteer.app.report.markup import element, text
from tokensteer.app.report.words import (
    HIGHER,
    LOWER,
    Look,
    heading,
    leaders,
    listed,
    metrics_of,
    of_answer,
    of_best,
    plural,
)
from tokensteer.app.words.numbers import NOTHING, number, short, spread
from tokensteer.tasks.common.metrics import Measured


@dataclass(frozen=True)
class Cell:
    """What is shown, as markup, and what it is sorted by."""

    shown: str
    value: float | str
    kind: str = ""


@dataclass(frozen=True)
class Column:
    heading: str
    cells: Sequence[Cell]
    hint: str = ""
    downward: bool = False
    """Whether the first click puts the highest on top."""


def table(rows: Sequence[Row], colours: Mapping[str, int], finished: bool) -> str:
    """One line for each row; `colours` by method. Unless the run is `finished`, no row is marked as the best."""
    columns = _who(rows, colours)
    if len({row.populations for row in rows}) > 1:
        columns.append(Column("B", [_count(row.populations) for row in rows], "populations"))
    columns += [_metric(rows, metric, of_answer, finished) for metric in metrics_of(rows)]
    columns.append(Column("log Z", [_log_z(row, rows) for row in rows], "log of the mean estimate of the normaliser"))
    columns += [_network(rows, network) for network in dict.fromkeys(n for row in rows for n in row.rows)]
    columns.append(Column("seconds", [_plain(row.seconds) for row in rows]))
    return _table("Methods, their metrics and what they cost", columns, len(rows)) + text(
        "p", note(rows, finished), 'class="note"'
    )


def best_table(rows: Sequence[Row], colours: Mapping[str, int], finished: bool) -> str:
    """The same for the best by reward of each population, which is no draw from the target; "" if not measured."""
    rows = [row for row in rows if row.best]
    columns = _who(rows, colours)
    columns += [_metric(rows, metric, of_best, finished) for metric in metrics_of(rows, of_best)]
    return _table("The best particle by reward of each population", columns, len(rows)) if rows else ""


def _who(rows: Sequence[Row], colours: Mapping[str, int]) -> list[Column]:
    columns = [
        Column("method", [Cell(swatch(colours[row.method]) + escape(row.method), row.method) for row in rows]),
        Column("N", [_count(row.particles) for row in rows], "particles in a population"),
    ]
    if len({row.seed for row in rows}) > 1:
        columns.append(Column("seed", [Cell(str(row.seed), row.seed) for row in rows]))
    return columns


def _table(title: str, columns: Sequence[Column], count: int) -> str:
    head = element("tr", "", *(_head(column) for column in columns))
    body = "".join(
        element("tr", "", *(_cell(column.cells[k], first=column is columns[0]) for column in columns))
        for k in range(count)
    )
    whole = element(
        "table",
        'class="methods"',
        text("caption", title, 'class="unseen"'),
        element("thead", "", head),
        element("tbody", "", body),
    )
    return element("div", f'class="box" tabindex="0" role="region" aria-label="{escape(title)}"', whole)


def note(rows: Sequence[Row], finished: bool) -> str:
    """How the table is read."""
    sizes = {row.populations for row in rows}
    seeds = max(row.seeds for row in rows)
    over = plural(sizes.pop(), "population") if len(sizes) == 1 else "populations"
    said = [f"Mean ± standard error over {over if seeds == 1 else f'{seeds} seeds, each of {over}'}."]
    if finished and any(leaders(rows, metric)[0] for metric in metrics_of(rows)):
        said.append("★ is the best of a column, ☆ what two standard errors do not tell from it.")
    exact = sorted({number(row.metrics["exact log_z"].mean, 5) for row in rows if "exact log_z" in row.metrics})
    if exact:
        said.append(f"The exact log Z is {listed(exact)}.")
    if any(missed(row) for row in rows):
        said.append("≠ is more than three standard errors from it.")
    if any(outdone(row, rows) for row in rows):
        said.append(
            "↓: another row puts the same Z more than three standard errors higher. Believe the higher one: estimates "
            "of Z are unbiased but skewed. They reach k times Z in one of k runs at most, while most may lie far below "
            "it and agree with each other."
        )
    if any(sum(row.saved.values()) for row in rows):
        said.append("Rows are what networks computed, + what was asked for but known already.")
    said.append("Click a heading to sort.")
    return " ".join(said)


def _head(column: Column) -> str:
    title = f' title="{escape(column.hint)}"' if column.hint else ""
    return element(
        "th",
        f'scope="col" aria-sort="none" data-first="{"descending" if column.downward else "ascending"}"{title}',
        element("button", 'type="button"', _broken(column.heading)),
    )


def _broken(words: str) -> str:
    """Long headings in two lines."""
    return escape(words).replace(" ", "<br>" if len(words) > 7 else "&nbsp;")


def _cell(cell: Cell, first: bool) -> str:
    value = escape(cell.value if isinstance(cell.value, str) else "" if math.isnan(cell.value) else repr(cell.value))
    kind = f' class="{cell.kind}"' if cell.kind else ""
    name, scope = ("th", 'scope="row" ') if first else ("td", "")
    return element(name, f'{scope}data-v="{value}"{kind}', cell.shown)


def _count(count: int) -> Cell:
    return Cell(f"{count:,}", count)


def _plain(value: float) -> Cell:
    return Cell(number(value, 3), value)


def _measured(measured: Measured) -> Cell:
    mean, error = spread(measured)
    return Cell(mean + (element("small", "", f" ± {error}") if error else ""), measured.mean)


def missed(row: Row) -> bool:
    """Whether log Z is known exactly and the estimate is far from it."""
    exact = row.metrics.get("exact log_z")
    return exact is not None and abs(row.log_z.mean - exact.mean) > 3.0 * row.log_z.error


def outdone(row: Row, rows: Sequence[Row]) -> bool:
    """Whether another row puts the same Z more than three standard errors higher, where the exact one is not known."""
    known = "exact log_z" in row.metrics
    return not known and any(_target(other) == _target(row) and _above(other.log_z, row.log_z) for other in rows)


def _target(row: Row) -> tuple[object, ...]:
    """All that Z depends on."""
    return tuple(row.job.get(name) for name in ("steps", "goal", "kl", "remask"))


def _above(high: Measured, low: Measured) -> bool:
    """Of Z itself, in units of the higher: errors of log Z are relative errors of Z. False where one is not known."""
    ratio = math.exp(min(0.0, low.mean - high.mean))
    return 1.0 - ratio > 3.0 * math.hypot(high.error, low.error * ratio)


def _log_z(row: Row, rows: Sequence[Row]) -> Cell:
    plain = _measured(row.log_z)
    if missed(row):
        mark, words = "≠", "more than three standard errors from the exact value"
    elif outdone(row, rows):
        mark, words = "↓", "another row puts the same Z more than three standard errors higher"
    else:
        return plain
    return Cell(
        f'<span class="off" title="{words}" role="img" aria-label="{words}">{mark}</span> {plain.shown}', plain.value
    )


def _metric(rows: Sequence[Row], metric: str, look: Look, finished: bool) -> Column:
    best, level = leaders(rows, metric, look) if finished else (None, [])

    def cell(row: Row) -> Cell:
        if metric not in look(row):
            return Cell(NOTHING, math.nan)
        plain = _measured(look(row)[metric])
        if row is best:
            mark = '<span class="star" title="best" role="img" aria-label="best">★</span>'
            return Cell(mark + plain.shown, plain.value, "first")
        if any(row is other for other in level):
            mark = '<span class="star" title="level with the best" role="img" aria-label="level with the best">☆</span>'
            return Cell(mark + plain.shown, plain.value, "level")
        return plain

    side = "higher is better" if metric in HIGHER else "lower is better" if metric in LOWER else ""
    return Column(heading(metric), [cell(row) for row in rows], side, metric in HIGHER)


def _network(rows: Sequence[Row], network: str) -> Column:
    def cell(row: Row) -> Cell:
        if network not in row.rows:
            return Cell(NOTHING, math.nan)
        saved = row.saved.get(network, 0)
        more = element("small", "", f" + {short(saved)}") if saved else ""
        return Cell(short(row.rows[network]) + more, row.rows[network])

    return Column(f"{network} rows", [cell(row) for row in rows], "computed + saved")
