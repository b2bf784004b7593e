"""Functions and dataclasses as commands, and what they answer to wrong input. Importing this does not load torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

EXPECTED = (ValueError, OSError, ImportError, FloatingPointError)
"""Errors of the library with a message for users: what is wrong and how to mend it."""


def run_command(module: str, command: Callable[..., object], arguments: Sequence[str] | None = None) -> None:
    """Call `python -m tokensteer.tasks.MODULE` with its options. `EXPECTED` errors are one line and exit status 2."""
    program = f"python -m tokensteer.tasks.{module}"
    try:
        tyro.cli(command, prog=program, args=arguments, config=(tyro.conf.FlagCreatePairsOff,))
    except EXPECTED as error:
        sys.stderr.write(f"{module}: {one_line(error)}\n")
        raise SystemExit(2) from error


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def given(**options: Any) -> dict[str, Any]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}
