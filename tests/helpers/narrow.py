"""What a test knows of a value and its type does not tell."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def some(value: T | None) -> T:
    """A value that is there."""
    assert value is not None
    return value


def untyped(value: object) -> Any:
    """A value of any type: arguments that are meant to be wrong, and members that an interface does not name."""
    return value
