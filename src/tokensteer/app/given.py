"""The options of a command as a flat table, as they are stored in config.json. Importing this module loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from tokensteer.app.options import Compare, Run

UNSTORED = frozenset({"out", "force", "resume"})
"""Options that say where and how results are written, and do not change them."""


def given(command: Run | Compare) -> dict[str, Any]:
    """The options that decide the results, by their names on the command line; those that are None are left out."""
    found: dict[str, Any] = {}
    for name, value in _flat(command):
        if value is not None and name not in UNSTORED:
            found[name.replace("_", "-")] = _stored(value)
    return found


def _stored(value: object) -> object:
    match value:
        case tuple():
            return list(cast("tuple[object, ...]", value))
        case Path():
            return str(value)
        case _:
            return value


def _flat(command: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for field in fields(command):
        value = getattr(command, field.name)
        found += _flat(value) if is_dataclass(value) else [(field.name, value)]
    return found


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two tables of options, in words."""

    def words(value: object) -> str:
        if isinstance(value, list):
            return " ".join(map(str, cast("list[object]", value)))
        return "not given" if value is None else str(value)

    names = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    return [
        f"{'' if name == 'task' else '--'}{name} was {words(before.get(name))} and is {words(now.get(name))}"
        for name in names
    ]
