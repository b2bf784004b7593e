"""The options of a command as a flat table: stored in config.json, and read from files that --config names. Importing
this module loads no torch."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from tokensteer.app.options import Compare, Run
from tokensteer.app.words.lookup import check_known

UNSTORED = frozenset({"out", "force", "resume", "config", "json", "workers", "ray", "gpus_per_worker"})
"""Options that say where and how results are computed and written, and do not change them."""


def storable(kind: type[Run | Compare]) -> list[str]:
    """The options that can be stored, and read by --config."""
    return [name.replace("_", "-") for name, _ in _flat(kind("")) if name not in UNSTORED]


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


def words_of(file: Path, name: str, known: Collection[str]) -> list[str]:
    """The words of a command line that a TOML file, or the config.json of a run, stands for. `name` is the command that
    they are for, and `known` has its options."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}: --config takes a TOML file, or the config.json of a run")
    table = _config(file, name) if file.suffix == ".json" else _toml(file)
    words: list[str] = []
    for key, value in table.items():
        option = key.replace("_", "-")
        check_known(option, known, f"option in {file}")
        values = cast("list[object]", value) if isinstance(value, list) else [value]
        if any(isinstance(part, dict | list) for part in values):
            raise ValueError(f"{option} of {file} must be a text, a number or a list of them, got {table[key]}")
        if option == "task":
            words.insert(0, str(table[key]))
        elif value is not False:
            words += [f"--{option}", *([] if value is True else map(str, values))]
    return words


def _toml(file: Path) -> Mapping[str, object]:
    try:
        return tomllib.loads(file.read_bytes().decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no TOML file ({error})") from error


def _config(file: Path, name: str) -> Mapping[str, object]:
    from tokensteer.files import read_json  # the module loads safetensors

    config = read_json(file)
    table = cast("dict[str, Any]", config) if isinstance(config, dict) else {}
    options, command = table.get("options"), str(table.get("command", "")).split()[1:2]
    if not isinstance(options, dict):
        raise ValueError(f"{file} has no options: --config takes the config.json of a run, or a TOML file")
    if command != [name]:
        raise ValueError(
            f"{file} is of tokensteer {' '.join(command)}, and this is tokensteer {name}: use that command"
        )
    return cast("dict[str, object]", options)
