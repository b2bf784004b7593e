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
from tokensteer.tasks.metrics import Measured

NUMBERED = re.compile(r"(.+) = (-?[\d.]+)")


@dataclass(frozen=True)
class Axis:
    """What was varied, and for each series its rows by value, in order."""

    name: str
    values: list[float]
    series: dict[str, dict[float, Row]]


def axis(rows: Sequence[Row]) -> Axis | None:
    """N if it varies, otherwise the last word of the variants if that is a number, otherwise nothing."""
    if len({row.particles for row in rows}) > 1:
        return _axis("N", [(row.method, float(row.particles), row) for row in rows])
    found = [(row, NUMBERED.fullmatch(row.variant[-1])) for row in rows if row.variant]
    numbered = [(row, match) for row, match in found if match is not None]
    if len({match[2] for _, match in numbered}) < 2 or len({match[1] for _, match in numbered}) > 1:
        return None
    return _axis(
        numbered[0][1][1],
        [(", ".join((row.family, *row.variant[:-1])), float(match[2]), row) for row, match in numbered],
    )


def _axis(name: str, placed: Sequence[tuple[str, float, Row]]) -> Axis:
    series: dict[str, dict[float, Row]] = {}
    for label, value, row in placed:
        series.setdefault(label, {}).setdefault(value, row)  # of several seeds the first
    values = sorted({value for _, value, _ in placed})
    return Axis(name, values, {label: dict(sorted(some.items())) for label, some in series.items()})


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
