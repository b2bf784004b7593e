"""The table of methods, which can be sorted by any column."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from tokensteer.app.report.charts import swatch
from tokensteer.app.report.folder import Row
from tokensteer.app.report.intervals import LEVEL, LEVELS, count, differ, half_width, student
from tokensteer.app.report.markup import element, text
from tokensteer.app.report.words import FLOOR, anchor, leaders, listed, metrics_of
from tokensteer.app.words.methods import DESCRIBED
from tokensteer.app.words.metrics import BIASED, DEFINED, HIGHER, LOWER, columns, title
from tokensteer.app.words.numbers import NOTHING, number, short, spread
from tokensteer.tasks.common.metrics import Measured


@dataclass(frozen=True)
class Cell:
    """Markup, and the value that the column is sorted by."""

    shown: str
    value: float | str
    kind: str = ""


UNKNOWN = Cell(NOTHING, math.nan)
UNMEASURED = Measured(math.nan, math.nan)
EXACT = "exact draws"
COLUMNS = 9  # of metrics and networks that fit beside each other


@dataclass(frozen=True)
class Column:
    heading: str
    cells: Sequence[Cell]
    hint: str = ""
    downward: bool = False
    """Whether the first click puts the highest on top."""


def table(rows: Sequence[Row], colours: Mapping[str, int], finished: bool) -> str:
    """One line for each row, and one for exact draws where their distance is known; `colours` by method. Unless the run
    is `finished`, no row is marked as the best."""
    every = [*rows, *floors(rows)]
    shown = _identity(every, colours)
    if len({row.populations for row in rows}) > 1:
        many = [UNKNOWN if row.method == EXACT else _count(row.populations) for row in every]
        shown.append(Column("B", many, "populations"))
    shown += [_metric(rows, every, metric, finished) for metric in metrics_of(rows)]
    shown.append(Column("log Z", [_log_z(row, rows) for row in every], DEFINED["log Z"]))
    networks = list(dict.fromkeys(n for row in rows for n in row.rows))
    crowded = len(metrics_of(rows)) + len(networks) > COLUMNS  # Cost has them apart
    shown += [_all_networks(every)] if crowded else [_network(every, network) for network in networks]
    shown.append(Column("seconds", [Cell(number(row.seconds), row.seconds) for row in every], DEFINED["seconds"]))
    apart = ", seed by seed" if len({row.seed for row in rows}) > 1 else ""
    return _table(f"Methods of {rows[0].task}, their metrics and what they cost{apart}", shown, len(every))


def legend(rows: Sequence[Row], finished: bool, beside: str = "") -> str:
    """How to read the table and what its columns mean, with something `beside` them."""
    read = text("p", note(rows, finished), 'class="note"')
    columns = (read + definitions(rows), beside) if beside else (read, definitions(rows))
    return element("div", 'class="legend"', *(element("div", "", column) for column in columns))


def definitions(rows: Sequence[Row]) -> str:
    """What the columns mean, a line each."""
    known = [m for m in (*metrics_of(rows), "log Z", "rows", "seconds") if m in DEFINED]
    return element("dl", 'class="defined"', *(text("dt", title(m)) + text("dd", DEFINED[m]) for m in known))


def floors(rows: Sequence[Row]) -> list[Row]:
    """A row of exact draws for each number of particles for which their distance to the target is known."""
    found: dict[tuple[int, int], Row] = {}
    for row in rows:
        if known := {m.removesuffix(FLOOR): v for m, v in row.metrics.items() if m.endswith(FLOOR)}:
            exact = replace(
                row,
                method=EXACT,
                metrics=known,
                counts={m: count(row, m + FLOOR) for m in known},
                seeds=1,
                log_z=UNMEASURED,
                seconds=math.nan,
                rows={},
                saved={},
            )
            alike = any(other.metrics == known for other in found.values())  # sets of as many draws
            if not alike:
                found.setdefault((row.particles, row.populations), exact)
    return list(found.values())


def best_table(rows: Sequence[Row], colours: Mapping[str, int]) -> str:
    """The metrics of the best particle by reward of each population; "" if they were not measured."""
    rows = [replace(row, metrics=row.best) for row in rows if row.best]
    metrics = [m for m in columns((row.metrics for row in rows), of_best=True) if not m.endswith(FLOOR)]
    shown = _identity(rows, colours) + [_metric(rows, rows, metric, False) for metric in metrics]
    return _table(f"The best particle by reward of each population, {rows[0].task}", shown, len(rows)) if rows else ""


def _identity(rows: Sequence[Row], colours: Mapping[str, int]) -> list[Column]:
    """Method, and where they differ size and seed."""

    def named(row: Row) -> Cell:
        if row.method == EXACT:
            return Cell(EXACT, EXACT, "floor")
        link = text("a", row.method, f'href="#{anchor(row.family)}"') if row.family in DESCRIBED else escape(row.method)
        return Cell(swatch(colours[row.method]) + link, row.method)

    shown = [Column("method", [named(row) for row in rows])]
    if len({row.particles for row in rows}) > 1:
        shown.append(Column("N", [_count(row.particles) for row in rows], "particles in a population"))
    if len({row.seed for row in rows}) > 1:
        shown.append(Column("seed", [Cell(str(row.seed), row.seed) for row in rows]))
    return shown


def _table(name: str, shown: Sequence[Column], count: int) -> str:
    lines = [element("tr", "", *(_cell(column.cells[k], column is shown[0]) for column in shown)) for k in range(count)]
    parts = (
        text("caption", name, 'class="unseen"'),
        element("thead", "", element("tr", "", *map(_head, shown))),
        element("tbody", "", *lines),
    )
    whole = element("table", 'class="methods"', *parts)
    return element("div", f'class="box" tabindex="0" role="region" aria-label="{escape(name)}"', whole)


def note(rows: Sequence[Row], finished: bool) -> str:
    """How to read the table."""
    n = sorted({count(row) for row in rows})
    over = "seeds" if max(row.seeds for row in rows) > 1 else "populations"
    sizes = sorted({row.particles for row in rows})
    of = listed([f"{size:,}" for size in sizes]) if len(sizes) < 4 else f"{sizes[0]:,} to {sizes[-1]:,}"
    said = [f"Mean ± half the 95% interval by Student's t, n = {listed([str(k) for k in n])} {over} of {of} particles."]
    said += _other_counts(rows)
    if finished and any(leaders(rows, metric)[0] for metric in metrics_of(rows)):
        said.append(f"★ is the best of a column, ☆ what does not differ from it at {LEVELS}.")
    if any(metric in BIASED for metric in metrics_of(rows)):
        said.append("Columns of the reward itself have no best: biased methods can exceed the target.")
    if exact_draws := floors(rows):
        n = sorted({many for row in exact_draws for many in row.counts.values()})
        said.append(
            f"{EXACT.capitalize()}: the distance of as many independent draws, n = {listed(list(map(str, n)))}."
        )
    exact = sorted({number(row.metrics["exact log_z"].mean, 5) for row in rows if "exact log_z" in row.metrics})
    if exact:
        said.append(f"The exact log Z is {listed(exact)}.")
    if any(missed(row, len(rows)) for row in rows):
        said.append(f"≠ differs from it at {LEVELS}.")
    if any(outdone(row, rows) for row in rows):
        said.append(
            f"↓: another row puts the same Z higher, at {LEVELS}. Believe the higher one: estimates "
            "of Z are unbiased but skewed. They reach k times Z in one of k runs at most, while most may lie far below "
            "it and agree with each other."
        )
    if any(sum(row.saved.values()) for row in rows):
        said.append("Rows are what networks computed, + what was needed but known already.")
    return " ".join([*said, "Click a heading to sort."])


def _other_counts(rows: Sequence[Row]) -> list[str]:
    """The n of metrics that are means over something else than the other columns, such as prompts."""
    named: dict[tuple[int, ...], list[str]] = {}
    for metric in metrics_of(rows):
        having = [row for row in rows if metric in row.metrics]
        if any(count(row, metric) != count(row) for row in having):
            named.setdefault(tuple(sorted({count(row, metric) for row in having})), []).append(title(metric))
    return [f"For {listed(names)} n = {listed([str(k) for k in n])}." for n, names in named.items()]


def _head(column: Column) -> str:
    hint = f' title="{escape(column.hint)}"' if column.hint else ""
    first = "descending" if column.downward else "ascending"
    words = column.heading
    broken = escape(words).replace(" ", "<br>" if len(words) > 7 else "&nbsp;")  # long headings in two lines
    button = element("button", 'type="button"', broken)
    return element("th", f'scope="col" aria-sort="none" data-first="{first}"{hint}', button)


def _cell(cell: Cell, first: bool) -> str:
    value = escape(cell.value if isinstance(cell.value, str) else "" if math.isnan(cell.value) else repr(cell.value))
    kind = f' class="{cell.kind}"' if cell.kind else ""
    name, scope = ("th", 'scope="row" ') if first else ("td", "")
    return element(name, f'{scope}data-v="{value}"{kind}', cell.shown)


def _count(count: int) -> Cell:
    return Cell(f"{count:,}", count)


def _small(sign: str, words: str) -> str:
    """A second number behind the first, if there is one."""
    return element("small", "", f" {sign} {words}") if words else ""


def _measured(measured: Measured, n: int, mark: str = "", kind: str = "") -> Cell:
    mean, error = spread(Measured(measured.mean, half_width(measured, n)))
    return Cell(mark + mean + _small("±", error), measured.mean, kind)


def _mark(kind: str, words: str, sign: str) -> str:
    return f'<span class="{kind}" title="{words}" role="img" aria-label="{words}">{sign}</span>'


def missed(row: Row, comparisons: int) -> bool:
    """Whether the exact log Z is known and the estimate differs from it."""
    exact, n = row.metrics.get("exact log_z"), count(row)
    if exact is None or n < 2:
        return False
    return abs(row.log_z.mean - exact.mean) > student(LEVEL / comparisons, n - 1) * row.log_z.error


def outdone(row: Row, rows: Sequence[Row]) -> bool:
    """Whether the exact Z is unknown and another row puts the same Z higher."""
    comparisons = max(1, math.comb(len(rows), 2))

    def target(row: Row) -> list[object]:
        """Everything that Z depends on."""
        return [row.job.get(name) for name in ("steps", "goal", "reward", "kl", "remask")]

    def higher(other: Row) -> bool:
        """Compares Z in units of the other: errors of log Z are relative errors of Z. False if either is unknown."""
        ratio = math.exp(min(0.0, row.log_z.mean - other.log_z.mean))
        here, there = Measured(ratio, row.log_z.error * ratio), Measured(1.0, other.log_z.error)
        return ratio < 1.0 and differ(here, count(row), there, count(other), comparisons)

    known = "exact log_z" in row.metrics
    return not known and any(target(other) == target(row) and higher(other) for other in rows)


def _log_z(row: Row, rows: Sequence[Row]) -> Cell:
    mark = ""
    if missed(row, len(rows)):
        mark = _mark("off", f"differs from the exact value at {LEVELS}", "≠") + " "
    elif outdone(row, rows):
        mark = _mark("off", f"another row puts the same Z higher, at {LEVELS}", "↓") + " "
    return _measured(row.log_z, count(row), mark)


def _metric(rows: Sequence[Row], every: Sequence[Row], metric: str, finished: bool) -> Column:
    """A column for `every` row, of which `rows` are compared."""
    best, level = leaders(rows, metric) if finished else (None, [])

    def cell(row: Row) -> Cell:
        if metric not in row.metrics:
            return UNKNOWN
        n = count(row, metric)
        if row is best:
            return _measured(row.metrics[metric], n, _mark("star", "best", "★"), "first")
        if any(row is other for other in level):
            return _measured(row.metrics[metric], n, _mark("star", "does not differ from the best", "☆"), "level")
        return _measured(row.metrics[metric], n)

    side = "; higher is better" if metric in HIGHER else "; lower is better" if metric in LOWER else ""
    return Column(title(metric), [cell(row) for row in every], DEFINED.get(metric, metric) + side, metric in HIGHER)


def _network(rows: Sequence[Row], network: str) -> Column:
    def cell(row: Row) -> Cell:
        if network not in row.rows:
            return UNKNOWN
        saved = row.saved.get(network, 0)
        return Cell(short(row.rows[network]) + _small("+", short(saved) if saved else ""), row.rows[network])

    return Column(f"{network} rows", [cell(row) for row in rows], "computed + saved")


def _all_networks(rows: Sequence[Row]) -> Column:
    def cell(row: Row) -> Cell:
        spent, saved = sum(row.rows.values()), sum(row.saved.values())
        return Cell(short(spent) + _small("+", short(saved) if saved else ""), spent) if row.rows else UNKNOWN

    return Column("network rows", [cell(row) for row in rows], "of all networks, computed + saved")
