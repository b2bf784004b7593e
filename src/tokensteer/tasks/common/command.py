"""Functions and dataclasses as commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tyro

from tokensteer.tasks.common.training import say


def run_command(module: str, command: Callable[..., object], arguments: Sequence[str] | None = None) -> None:
    """Call `python -m tokensteer.tasks.MODULE` with its options. Wrong input is one line and the exit status 2."""
    program = f"python -m tokensteer.tasks.{module}"
    try:
        tyro.cli(command, prog=program, args=arguments, config=(tyro.conf.FlagCreatePairsOff,))
    except (FileNotFoundError, ValueError) as error:
        say(f"{module}: {error}")
        raise SystemExit(2) from error


def given(**options: Any) -> dict[str, Any]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}
