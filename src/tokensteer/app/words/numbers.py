"""Numbers as text, and as JSON stores them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tokensteer.tasks.common.metrics import Measured

NOTHING = "–"


def fixed(value: float, decimals: int) -> str:
    """A fixed number of decimals, with a typographic minus sign and no sign before zero."""
    text = f"{value:,.{decimals}f}"
    return text.lstrip("-") if not text.strip("-0.,") else text.replace("-", "−")


def number(value: float, digits: int = 3) -> str:
    """About `digits` significant digits, without an exponent from 1e-4 up to 1e7."""
    if math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.{digits - 1}e}".replace("-", "−")
    size = math.floor(math.log10(abs(value))) if value else 0
    return fixed(value, max(0, digits - 1 - size))


def spread(measured: Measured) -> tuple[str, str]:
    """The mean with as many decimals as its error justifies, and the error with two digits, "" if it is unknown."""
    mean, error = measured.mean, measured.error
    if not math.isfinite(mean) or not math.isfinite(error) or not 0 < error < 1e6:
        return number(mean, 4), ""
    decimals = min(4, max(0, 1 - math.floor(math.log10(error))))
    return fixed(mean, decimals), fixed(error, decimals)


def with_error(measured: Measured, sign: str = " ± ") -> str:
    """Mean and standard error, or the mean alone if the error is unknown."""
    return sign.join(part for part in spread(measured) if part)


def short(count: float) -> str:
    """A count in few characters: 950, 2.0k, 200k, 2.0M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:.{1 if count < 9.95 * size else 0}f}{unit}"
    return f"{count:.0f}"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    if math.isnan(seconds):
        return NOTHING
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{number(seconds, 2 if seconds < 10 else 3)} s"


def stored(measured: Measured) -> list[float | None]:
    """Mean and standard error for JSON, which has no NaN: null instead."""
    return list(measured.numbers().values())


def loaded(value: float | None) -> float:
    """A stored number, NaN for null."""
    return math.nan if value is None else float(value)


def loaded_pair(pair: Sequence[float | None]) -> Measured:
    """What `stored` wrote."""
    mean, error = map(loaded, pair)
    return Measured(mean, error)
