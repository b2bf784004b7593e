"""Checks that numbers, flags and functions given by users are what they should be, for use at construction."""

from __future__ import annotations

from dataclasses import fields
from operator import index
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def check_whole(name: str, value: object, least: int = 1, hint: str = "") -> None:
    """Raise ValueError unless the value is a whole number of at least `least`; 16.0 and True are none."""
    try:
        number = None if isinstance(value, bool) else index(cast("Any", value))
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{name} must be a whole number, got {value!r}{_and(hint)}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {value}{_and(hint)}")


def check_wholes(owner: str, least: int = 1, /, **values: object) -> None:
    """`check_whole` for several numbers or tuples of numbers of an object; None is not checked."""
    for name, value in values.items():
        for one in cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,):
            if one is not None:
                check_whole(f"{owner}.{name}", one, least)
        if value == ():
            raise ValueError(f"{owner}.{name} must hold at least one number, got none")


def check_seed(name: str, value: object) -> None:
    """Raise ValueError unless the value is a whole number from 0 to 2^63 - 1."""
    check_whole(name, value, -(2**63))
    if not 0 <= index(cast("Any", value)) < 2**63:
        raise ValueError(f"{name} must be a number from 0 to 2^63 - 1, got {value}")


def check_number(name: str, value: object, domain: str = "(-inf, inf)", hint: str = "") -> None:
    """Raise ValueError unless the value is a number in the interval `domain`, written as "(0, 1]"; NaN is in none."""
    try:
        number = None if isinstance(value, bool | str) else float(cast("Any", value))
    except (TypeError, ValueError):
        number = None
    if number is None:
        raise ValueError(f"{name} must be a number, got {value!r}{_and(hint)}")
    low, high = (float(end) for end in domain[1:-1].split(","))
    above = number >= low if domain[0] == "[" else number > low
    below = number <= high if domain[-1] == "]" else number < high
    if not (above and below):
        raise ValueError(f"{name} must {_WORDS.get(domain, f'lie in {domain}')}, got {value}{_and(hint)}")


def check_numbers(owner: str, domain: str, /, **values: object) -> None:
    """`check_number` for several numbers of an object; None is not checked."""
    for name, value in values.items():
        if value is not None:
            check_number(f"{owner}.{name}", value, domain)


def check_flag(name: str, value: object, optional: bool = False) -> None:
    """Raise ValueError unless the value is True or False, or None if it is `optional`; 1 and "False" are neither."""
    if not isinstance(value, bool) and not (optional and value is None):
        choices = "True, False or None" if optional else "True or False"
        raise ValueError(f"{name} must be {choices}, got {value!r}")


def check_flags(part: DataclassInstance) -> None:
    """`check_flag` for the fields of an object that are declared as `bool` or as `bool | None`."""
    for field in fields(part):
        optional = field.type in ("bool | None", bool | None)
        if optional or field.type in ("bool", bool):
            check_flag(f"{type(part).__name__}.{field.name}", getattr(part, field.name), optional)


def check_callable(name: str, value: object, of: str) -> None:
    """Raise TypeError unless the value can be called; `of` says with what, and names an example."""
    if not callable(value):
        raise TypeError(f"{name} must be a function of {of}, got {value!r}")


_WORDS = {
    "(-inf, inf)": "be finite",
    "[-inf, inf]": "be a number",
    "(0, inf)": "be positive and finite",
    "[0, inf)": "be finite and not negative",
}


def _and(hint: str) -> str:
    return f": {hint}" if hint else ""
