"""The command line. What a person got wrong is said in one line, with exit code 2 and nothing half-written."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

import tyro

import tokensteer
from tokensteer.app.options import COMMANDS, HELP, Check, Compare, Demo, Doctor, Report, Run, Train
from tokensteer.app.words.lookup import choose

EXPECTED = (ValueError, OSError, ImportError, FloatingPointError)
"""What the library raises to say what is wrong and how to mend it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of `tokensteer ARGUMENTS`."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if not words or words[0] in ("-h", "--help"):
            print(HELP)
            return 0
        if words[0] == "--version":
            print(f"tokensteer {tokensteer.__version__}")
            return 0
        kind, about = choose(words[0], COMMANDS, "command")
        try:
            command = tyro.cli(kind, args=words[1:], prog=f"tokensteer {words[0]}", description=about)
        except SystemExit as stopped:  # tyro has said it all
            return stopped.code if isinstance(stopped.code, int) else 2
        return _dispatch(command, shlex.join(["tokensteer", *words]))
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
    """Whether it was memory that there was not enough of."""
    from tokensteer.core.numerics import batching as chunks  # loads torch

    return chunks.ran_out(error) or "Storage size calculation overflowed" in str(error)


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _dispatch(command: object, words: str) -> int:
    # Each command loads what it needs; torch takes seconds.
    match command:
        case Run() | Compare():
            from tokensteer.app.commands.run import steer

            return steer(command, words)
        case Demo():
            from tokensteer.app.commands.demo import demo

            return demo(command, words)
        case Train():
            from tokensteer.app.commands.train import train

            return train(command)
        case Report():
            from tokensteer.app.commands.report import report

            return report(command)
        case Check():
            from tokensteer.app.commands.check import check

            return check(command)
        case Doctor():
            from tokensteer.app.commands.doctor import doctor

            return doctor()
        case _:
            raise TypeError(f"no such command: {command!r}")


def run() -> None:
    """The script `tokensteer`."""
    raise SystemExit(main())
