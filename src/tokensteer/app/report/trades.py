"""Two metrics of which one is bought with the other, drawn against each other, and who is beaten in neither."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokensteer.app.report.charts import Spot, scatter
from tokensteer.app.report.folder import Row
from tokensteer.app.report.words import LOWER, heading, listed, naming

PAIRS = (("activity", "3-mer correlation"), ("accuracy", "perplexity"), ("accuracy", "diversity"))
"""What is steered for, and what tends to be lost by it; of several the first that was measured."""


@dataclass(frozen=True)
class Trade:
    """The rows that have both metrics, and their Pareto front from the least x to the most."""

    x: str
    y: str
    rows: Sequence[Row]
    front: Sequence[Row]


def trade(rows: Sequence[Row]) -> Trade | None:
    """None where no pair was measured of at least three rows."""
    for x, y in PAIRS:
        known = [row for row in rows if all(m in row.metrics and math.isfinite(row.metrics[m].mean) for m in (x, y))]
        if len(known) >= 3:
            return Trade(x, y, known, front(known, x, y))
    return None


def front(rows: Sequence[Row], x: str, y: str) -> list[Row]:
    """The rows that no other is at least as good as in both metrics and better in one."""

    def worth(row: Row) -> tuple[float, float]:
        first, second = (-row.metrics[m].mean if m in LOWER else row.metrics[m].mean for m in (x, y))
        return first, second

    def beaten(row: Row) -> bool:
        mine = worth(row)
        return any(theirs != mine and theirs[0] >= mine[0] and theirs[1] >= mine[1] for theirs in map(worth, rows))

    return sorted((row for row in rows if not beaten(row)), key=lambda row: row.metrics[x].mean)


def chart(rows: Sequence[Row], colours: Mapping[str, int]) -> str:
    """A dot for each row, or nothing where there is nothing to trade."""
    found = trade(rows)
    if found is None:
        return ""
    name = naming(rows)
    spots = [Spot(name(row), colours[row.method], row.metrics[found.x], row.metrics[found.y]) for row in found.rows]
    way = [(row.metrics[found.x].mean, row.metrics[found.y].mean) for row in found.front]
    title = f"{heading(found.y)} against {heading(found.x)}"
    return scatter(title, spots, way, f"On the front: {listed([name(row) for row in found.front])}")
