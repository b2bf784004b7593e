"""One process at a time in a folder: whoever writes there first puts down a claim.

The claim is a file that says which process made it: its number, its start and its machine. It is removed when the
process is done. A claim whose process no longer runs is taken over.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from tokensteer import files

CLAIM = ".tokensteer-claim"


@contextmanager
def claimed(folder: Path) -> Generator[None, None, None]:
    """Hold a folder, which is made if it is not there, and removed afterwards if it is still empty."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _claim(folder / CLAIM)
    except OSError as error:
        _remove_empty(made)
        if isinstance(error, BlockingIOError):
            raise
        raise OSError(f"{folder} cannot be written to ({error.strerror}): give --out another folder") from error
    try:
        yield
    finally:
        (folder / CLAIM).unlink(missing_ok=True)
        _remove_empty(made)


def _claim(file: Path) -> None:
    """Create the claim, or raise BlockingIOError if the process of another one may still run."""
    while True:
        try:
            handle = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            _give_way(file)
            continue
        with os.fdopen(handle, "wb") as claim:
            claim.write(json.dumps(_holder(os.getpid())).encode())
        return


def _give_way(file: Path) -> None:
    """Remove a claim whose process is gone. Others may do the same at this moment, so it is moved aside first, and put
    back if it is no longer the one that was looked at."""
    try:
        seen = file.read_bytes()
        _check_gone(file, seen)
        aside = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}{files.STRAY}")
        file.rename(aside)
        if aside.read_bytes() != seen:
            aside.rename(file)
            return
        aside.unlink()
    except FileNotFoundError:  # somebody else was faster
        return


def _check_gone(file: Path, content: bytes) -> None:
    try:
        held = cast("dict[str, object]", json.loads(content))
        pid, host = int(str(held["pid"])), held["host"]
        here = host == platform.node()
        if here and (not files.is_running(pid) or _holder(pid)["start"] != held["start"]):
            return
        who = f"process {pid}" + ("" if here else f" on {host}")
    except (ValueError, TypeError, KeyError):  # another process is writing it at this moment
        who = "another process"
    raise BlockingIOError(
        f"{file.parent} is being written to by {who}: wait for it, or give --out another folder "
        f"(if no such process runs, delete {file})"
    )


def _holder(pid: int) -> dict[str, object]:
    return {"pid": pid, "host": platform.node(), "start": _start(pid)}


def _start(pid: int) -> str | None:
    """When a process started, in ticks since the machine did: numbers of processes are used again. None if unknown."""
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return words[19].decode()
    except (OSError, IndexError):
        return None


def _remove_empty(folders: list[Path]) -> None:
    """From the innermost to the outermost, as far as they are empty."""
    try:
        for folder in folders:
            folder.rmdir()
    except OSError:
        return
