"""Numbers as a person writes them."""

from __future__ import annotations

import math

from tokensteer.tasks.common.metrics import Measured

NOTHING = "–"


def fixed(value: float, decimals: int) -> str:
    """With a true minus sign, and none before a zero."""
    text = f"{value:,.{decimals}f}"
    return text.lstrip("-") if not text.strip("-0.,") else text.replace("-", "−")


def number(value: float, digits: int = 3) -> str:
    """About `digits` significant ones, never an exponent for what is in reach."""
    if math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.{digits - 1}e}".replace("-", "−")
    size = math.floor(math.log10(abs(value))) if value else 0
    return fixed(value, max(0, digits - 1 - size))


def spread(measured: Measured) -> tuple[str, str]:
    """The mean with as many places as its error bears, and the error with two digits; "" if there is none."""
    mean, error = measured.mean, measured.error
    if not math.isfinite(mean) or not math.isfinite(error) or not 0 < error < 1e6:
        return number(mean, 4), ""
    decimals = min(4, max(0, 1 - math.floor(math.log10(error))))
    return fixed(mean, decimals), fixed(error, decimals)


def short(count: float) -> str:
    """A count in few places: 950, 2.0k, 200k, 2.0M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:.{1 if count < 9.95 * size else 0}f}{unit}"
    return f"{count:.0f}"


def duration(seconds: float) -> str:
    if math.isnan(seconds):
        return NOTHING
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{number(seconds, 2 if seconds < 10 else 3)} s"
