"""The command line. A user's mistake gives one line on standard error, exit code 2 and no half-written files."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import tyro

import tokensteer
from tokensteer.app.given import storable, words_of
from tokensteer.app.options import COMMANDS, HELP, Command, Compare, Outcome, Run
from tokensteer.app.validate import validate
from tokensteer.app.words.lookup import choose
from tokensteer.tasks.common.command import EXPECTED, one_line

CLOSED_PIPE = 128 + 13
"""The exit code that a shell reports for SIGPIPE, which Python does not die of."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of `tokensteer ARGUMENTS`."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if not words or words[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if words[0] in ("-V", "--version"):
        print(f"tokensteer {tokensteer.__version__}")
        return 0
    try:
        try:
            command = parsed(words)
        except SystemExit as stopped:  # tyro has printed help or an error
            code = stopped.code if isinstance(stopped.code, int) else 2
            return _failed(words, "the options cannot be read", code) if code and "--json" in words else code
        validate(command)
        outcome = _run(command, words)
    except KeyboardInterrupt:
        return _failed(words, "stopped; what was finished is kept", 130)
    except BrokenPipeError:  # it is an OSError, and no mistake of the user
        raise
    except EXPECTED as error:
        if os.environ.get("TOKENSTEER_TRACEBACK"):
            raise
        return _failed(words, one_line(error))
    except (RuntimeError, MemoryError) as error:
        if os.environ.get("TOKENSTEER_TRACEBACK") or not ran_out(error):
            raise
        mend = "use fewer --particles or --populations, or a smaller --memory"
        return _failed(words, f"there is not enough memory ({one_line(error)[:200]}): {mend}")
    if command.json:
        print(json.dumps({"command": words[0], **outcome}, ensure_ascii=False))
    return 0


def parsed(words: Sequence[str]) -> Command:
    """The command with its options; those of --config are its defaults."""
    name = words[0]
    kind, about = choose(name, COMMANDS, "command")
    prog = f"tokensteer {name}"
    if issubclass(kind, Run | Compare) and (file := _config_file(words)) is not None:
        stored = words_of(file, name, storable(kind))
        has_task = bool(stored) and not stored[0].startswith("--")
        default = tyro.cli(kind, args=stored if has_task else ["", *stored], prog=f"{file}: {prog}")
        default = default if has_task else replace(default, task=tyro.MISSING)
        return tyro.cli(kind, args=words[1:], default=default, prog=prog, description=about)
    return tyro.cli(kind, args=words[1:], prog=prog, description=about)


def _config_file(words: Sequence[str]) -> Path | None:
    """The last file that --config names."""
    named = [after for word, after in pairwise(words) if word == "--config"]
    named += [word.removeprefix("--config=") for word in words if word.startswith("--config=")]
    return Path(named[-1]) if named else None


def _run(command: Command, words: Sequence[str]) -> Outcome:
    """Run a command. With --json all that it prints goes to the standard error stream."""
    module = import_module(f"tokensteer.app.commands.{words[0]}")  # only now: torch takes seconds to load
    with redirect_stdout(sys.stderr) if command.json else nullcontext():
        return module.main(command, shlex.join(["tokensteer", *words]))


def _failed(words: Sequence[str], reason: str, code: int = 2) -> int:
    """Say why a command failed."""
    print(f"tokensteer: {reason}", file=sys.stderr)
    if "--json" in words:
        print(json.dumps({"command": words[0], "error": reason}, ensure_ascii=False))
    return code


def ran_out(error: Exception) -> bool:
    """Whether an error means that there is not enough memory."""
    from tokensteer.core.numerics import batching  # loads torch

    return batching.ran_out(error) or "Storage size calculation overflowed" in str(error)


def run() -> None:
    """The script `tokensteer`."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes again at exit
        code = CLOSED_PIPE
    raise SystemExit(code)
