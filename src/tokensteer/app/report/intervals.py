"""Intervals and comparisons by Student's t, from means, standard errors and the number of independent values.

Marks that say that two numbers differ hold at `LEVEL` over a whole table: by Bonferroni, each of its m comparisons is
made at LEVEL/m.
"""

from __future__ import annotations

import math
from functools import cache

from tokensteer.app.report.folder import Row
from tokensteer.tasks.common.metrics import Measured

LEVEL = 0.05
MOST = 1000
LEVELS = "the 5% level over the whole table"


def tail(t: float, df: int) -> float:
    """P(|T| > t) of Student's t with whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(df))
    odd, cosine = df % 2, math.cos(angle)
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(2 if not odd else 3, df + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    inside = 2.0 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return max(0.0, 1.0 - inside)


@cache
def student(level: float, df: int) -> float:
    """The t with P(|T| > t) = level. Beyond MOST degrees of freedom it hardly falls."""
    df = min(df, MOST)
    low, high = 0.0, 1.0
    while tail(high, df) > level:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if tail(middle, df) > level else (low, middle)
    return high


def count(row: Row, metric: str = "") -> int:
    """How many independent values a mean of a row is over: seeds, or else populations, sets of them or prompts."""
    return row.seeds if row.seeds > 1 else row.counts.get(metric, row.populations)


def half_width(measured: Measured, n: int) -> float:
    """Half the 95% interval of a mean over n values, NaN if unknown."""
    return student(LEVEL, n - 1) * measured.error if n > 1 else math.nan


def interval(row: Row, metric: str) -> Measured:
    """A metric with half its 95% interval in place of its standard error."""
    return Measured(row.metrics[metric].mean, half_width(row.metrics[metric], count(row, metric)))


def differ(one: Measured, n: int, other: Measured, m: int, comparisons: int) -> bool:
    """Whether the means of n and of m values differ, by Welch's test at LEVEL over all `comparisons`."""
    if not (math.isfinite(one.error) and math.isfinite(other.error) and min(n, m) > 1):
        return False
    error = math.hypot(one.error, other.error)
    if not error:
        return one.mean != other.mean
    shares = ((one.error / error) ** 2, n), ((other.error / error) ** 2, m)
    df = 1.0 / sum(share**2 / (k - 1) for share, k in shares)
    return abs(one.mean - other.mean) > student(LEVEL / comparisons, max(1, math.floor(df))) * error
