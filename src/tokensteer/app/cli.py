"""The command line. A user's mistake gives one line on standard error, exit code 2 and no half-written files."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module

import tyro

import tokensteer
from tokensteer.app.options import COMMANDS, HELP
from tokensteer.app.validate import validate
from tokensteer.app.words.lookup import choose

EXPECTED = (ValueError, OSError, ImportError, FloatingPointError)
"""Errors of the library with a message for users: what is wrong and how to mend it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of `tokensteer ARGUMENTS`."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if words[:1] == ["help"]:
            words = [*words[1:2], "--help"]
        if not words or words[0] in ("-h", "--help"):
            print(HELP)
            return 0
        if words[0] in ("-V", "--version"):
            print(f"tokensteer {tokensteer.__version__}")
            return 0
        kind, about = choose(words[0], COMMANDS, "command")
        try:
            command = tyro.cli(kind, args=words[1:], prog=f"tokensteer {words[0]}", description=about)
        except SystemExit as stopped:  # tyro has printed help or an error
            return stopped.code if isinstance(stopped.code, int) else 2
        validate(command)
        module = import_module(f"tokensteer.app.commands.{words[0]}")  # only now: torch takes seconds to load
        return module.main(command, shlex.join(["tokensteer", *words]))
    except KeyboardInterrupt:
        print("tokensteer: stopped; what was finished is kept", file=sys.stderr)
        return 130
    except EXPECTED as error:
        if os.environ.get("TOKENSTEER_TRACEBACK"):
            raise
        print(f"tokensteer: {one_line(error)}", file=sys.stderr)
        return 2
    except (RuntimeError, MemoryError) as error:
        if os.environ.get("TOKENSTEER_TRACEBACK") or not ran_out(error):
            raise
        mend = "use fewer --particles or --populations, or a smaller --memory"
        print(f"tokensteer: there is not enough memory ({one_line(error)[:200]}): {mend}", file=sys.stderr)
        return 2


def ran_out(error: Exception) -> bool:
    """Whether an error means that there is not enough memory."""
    from tokensteer.core.numerics import batching  # loads torch

    return batching.ran_out(error) or "Storage size calculation overflowed" in str(error)


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def run() -> None:
    """The script `tokensteer`."""
    raise SystemExit(main())
