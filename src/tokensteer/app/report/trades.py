"""Two metrics that trade off against each other, as a scatter plot with its Pareto front."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokensteer.app.report.folder import Row
from tokensteer.app.report.intervals import interval
from tokensteer.app.report.scatter import Spot, scatter
from tokensteer.app.report.words import listed, naming
from tokensteer.app.words.metrics import LOWER, title

PAIRS = (("activity", "3-mer correlation"), ("accuracy", "perplexity"), ("accuracy", "diversity"))
"""A metric that is steered for, and one that tends to suffer. The first pair that was measured is drawn."""


@dataclass(frozen=True)
class Trade:
    """The rows that have both metrics, and their Pareto front from the least x to the most."""

    x: str
    y: str
    rows: Sequence[Row]
    front: Sequence[Row]

    @property
    def way(self) -> list[tuple[float, float]]:
        """The points of the front."""
        return [(row.metrics[self.x].mean, row.metrics[self.y].mean) for row in self.front]


def trade(rows: Sequence[Row]) -> Trade | None:
    """None unless at least three rows have both metrics of a pair."""
    for x, y in PAIRS:
        known = [row for row in rows if all(m in row.metrics and math.isfinite(row.metrics[m].mean) for m in (x, y))]
        if len(known) >= 3:
            return Trade(x, y, known, front(known, x, y))
    return None


def front(rows: Sequence[Row], x: str, y: str) -> list[Row]:
    """The rows to which no other is at least equal in both metrics and better in one."""

    def worth(row: Row) -> tuple[float, float]:
        first, second = (-row.metrics[m].mean if m in LOWER else row.metrics[m].mean for m in (x, y))
        return first, second

    def beaten(row: Row) -> bool:
        mine = worth(row)
        return any(theirs != mine and theirs[0] >= mine[0] and theirs[1] >= mine[1] for theirs in map(worth, rows))

    return sorted((row for row in rows if not beaten(row)), key=lambda row: row.metrics[x].mean)


def chart(rows: Sequence[Row], colours: Mapping[str, int]) -> str:
    """A point for each row; "" where there is no trade-off to draw."""
    found = trade(rows)
    if found is None:
        return ""
    name = naming(rows, briefly=True)
    spots = [Spot(name(row), colours[row.method], interval(row, found.x), interval(row, found.y)) for row in found.rows]
    note = f"On the front: {listed([name(row) for row in found.front])}"
    return scatter((title(found.x), title(found.y)), spots, found.way, note)
