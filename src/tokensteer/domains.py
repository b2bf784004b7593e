"""What numbers may be: the checks of all constructors outside the core, in one form of words. None is never checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

LARGEST_SEED = 2**63
"""Seeds are below this, so that small numbers can be added to them."""


def whole(owner: str, least: int = 1, **values: object) -> None:
    """Whole numbers from `least` on."""
    _check(owner, values, Integral, lambda value: value >= least, f"a whole number of at least {least}")


def all_whole(owner: str, **values: tuple[object, ...]) -> None:
    """Tuples of one or more whole numbers from 1 on."""
    for name, several in values.items():
        if not several:
            raise ValueError(f"{owner}: {name} must hold at least one number, got none")
        for value in several:
            whole(owner, 1, **{name: value})


def positive(owner: str, **values: object) -> None:
    """Finite numbers above 0."""
    _check(owner, values, Real, lambda value: 0 < value < math.inf, "a finite number above 0")


def limit(owner: str, **values: object) -> None:
    """Numbers above 0, inf for no limit."""
    _check(owner, values, Real, lambda value: value > 0, "a number above 0, or inf for no limit")


def not_negative(owner: str, **values: object) -> None:
    """Finite numbers from 0 on."""
    _check(owner, values, Real, lambda value: 0 <= value < math.inf, "a finite number of at least 0")


def share(owner: str, **values: object) -> None:
    """Numbers from 0 to 1."""
    _check(owner, values, Real, lambda value: 0 <= value <= 1, "a share, from 0 to 1")


def decay(owner: str, **values: object) -> None:
    """Numbers from 0 to 1, without 1."""
    _check(owner, values, Real, lambda value: 0 <= value < 1, "a share from 0 to 1, and below 1")


def seed(owner: str, **values: object) -> None:
    _check(owner, values, Integral, lambda value: 0 <= value < LARGEST_SEED, "a whole number from 0 to 2^63 - 1")


def _check(owner: str, values: dict[str, object], kind: type, fits: Callable[[Any], bool], expected: str) -> None:
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kind) or not fits(value):
            raise ValueError(f"{owner}: {name} must be {expected}, got {value!r}")
