"""Charts of metrics against what was varied: the number of particles, or a number in the labels of variants."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokensteer.app.report.charts import Line, point_chart
from tokensteer.app.report.folder import Row
from tokensteer.app.report.intervals import interval
from tokensteer.app.report.markup import element
from tokensteer.app.report.words import COLOURS, metrics_of
from tokensteer.app.words.metrics import title
from tokensteer.tasks.common.metrics import Measured

NUMBERED = re.compile(r"(.+) = (-?[\d.]+)")
UNKNOWN = Measured(math.nan, math.nan)


@dataclass(frozen=True)
class Axis:
    """What was varied, and for each series its rows by value, in order."""

    name: str
    values: list[float]
    series: dict[str, dict[float, Row]]


Placed = tuple[str, str, float, Row]
"""The name of the axis, the series, the value on the axis, and the row."""


def axis(rows: Sequence[Row]) -> Axis | None:
    """The number at the end of the variants if they have one, otherwise N; None where neither varies."""
    sizes = {row.method: {other.particles for other in rows if other.method == row.method} for row in rows}
    numbered: list[Placed] = []
    for row in rows:
        if row.variant and (match := NUMBERED.fullmatch(row.variant[-1])):
            size = (f"N = {row.particles}",) if len(sizes[row.method]) > 1 else ()
            numbered.append((match[1], ", ".join((row.family, *row.variant[:-1], *size)), float(match[2]), row))
    return _varied(numbered) or _varied([("N", row.method, float(row.particles), row) for row in rows])


def _varied(placed: Sequence[Placed]) -> Axis | None:
    """An axis, if it is the same for all rows and some series has more than one of them."""
    series: dict[str, dict[float, Row]] = {}
    for _, label, value, row in placed:
        series.setdefault(label, {}).setdefault(value, row)
    if len({name for name, *_ in placed}) != 1 or max(map(len, series.values())) < 2:
        return None
    values = sorted({value for _, _, value, _ in placed})
    return Axis(placed[0][0], values, {label: dict(sorted(some.items())) for label, some in series.items()})


def charts(rows: Sequence[Row], colours: Mapping[str, int]) -> str:
    """A chart for each metric; "" if nothing was varied."""
    found = axis(rows)
    if found is None:
        return ""
    drawn: list[str] = []
    for metric in metrics_of(rows):
        lines: list[Line] = []
        for k, (name, some) in enumerate(found.series.items()):
            here = [v in some and metric in some[v].metrics for v in found.values]
            marks = [interval(some[v], metric) if h else UNKNOWN for v, h in zip(found.values, here, strict=True)]
            colour = colours.get(name, 1 + k % COLOURS)
            lines.append(Line(name, colour, [m.mean for m in marks], [m.error for m in marks]))
        labels = [f"{value:g}" for value in found.values]
        known = [line for line in lines if any(map(math.isfinite, line.mean))]
        drawn.append(point_chart((found.name, title(metric)), known, labels))
    return element("div", 'class="trio middle"', *drawn)
