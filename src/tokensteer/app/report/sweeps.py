"""Metrics against what was varied: the number of particles, or a number that tells variants of a method apart."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokensteer.app.report.charts import Points, point_chart
from tokensteer.app.report.folder import Row
from tokensteer.app.report.markup import element
from tokensteer.app.report.words import COLOURS, heading, metrics_of
from tokensteer.tasks.common.metrics import Measured

NUMBERED = re.compile(r"(.+) = (-?[\d.]+)")


@dataclass(frozen=True)
class Axis:
    """What was varied, and for each series its rows by value, in order."""

    name: str
    values: list[float]
    series: dict[str, dict[float, Row]]


def axis(rows: Sequence[Row]) -> Axis | None:
    """The last word of the variants if that is a number, otherwise N; nothing where it does not vary."""
    return _varied(_numbered(rows)) or _varied([("N", row.method, float(row.particles), row) for row in rows])


Placed = tuple[str, str, float, Row]
"""What a row is placed by, its series, its value, the row."""


def _numbered(rows: Sequence[Row]) -> list[Placed]:
    found = [(row, NUMBERED.fullmatch(row.variant[-1])) for row in rows if row.variant]
    sizes = {row.method: {other.particles for other in rows if other.method == row.method} for row in rows}
    placed: list[Placed] = []
    for row, match in found:
        if match is not None:
            size = (f"N = {row.particles}",) if len(sizes[row.method]) > 1 else ()
            placed.append((match[1], ", ".join((row.family, *row.variant[:-1], *size)), float(match[2]), row))
    return placed


def _varied(placed: Sequence[Placed]) -> Axis | None:
    """An axis, if all rows are placed by the same and some series has more than one of them."""
    series: dict[str, dict[float, Row]] = {}
    for _, label, value, row in placed:
        series.setdefault(label, {}).setdefault(value, row)
    if len({name for name, *_ in placed}) != 1 or max(map(len, series.values())) < 2:
        return None
    values = sorted({value for _, _, value, _ in placed})
    return Axis(placed[0][0], values, {label: dict(sorted(some.items())) for label, some in series.items()})


def charts(rows: Sequence[Row], colours: Mapping[str, int]) -> str:
    """A chart for each metric, or nothing if nothing was varied."""
    found = axis(rows)
    if found is None:
        return ""
    labels = [f"{value:g}" for value in found.values]
    drawn: list[str] = []
    for metric in metrics_of(rows):
        lines: list[Points] = []
        for k, (name, some) in enumerate(found.series.items()):
            marks = [_of(some.get(value), metric) for value in found.values]
            if any(math.isfinite(mark.mean) for mark in marks):
                colour = colours.get(name, 1 + k % COLOURS)
                lines.append(Points(name, colour, [m.mean for m in marks], [m.error for m in marks]))
        drawn.append(point_chart(f"{heading(metric)} against {found.name}", lines, labels))
    return element("div", 'class="trio middle"', *drawn)


def _of(row: Row | None, metric: str) -> Measured:
    missing = Measured(math.nan, math.nan)
    return missing if row is None else row.metrics.get(metric, missing)
