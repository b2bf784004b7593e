"""A claim file lets only one process at a time write to a folder.

The claim names the process that made it: pid, start time and machine. The process removes it when it is done. A claim
whose process no longer runs is taken over.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

import tokensteer.files as files  # "from tokensteer import" would load the api, which loads this module

CLAIM = ".tokensteer-claim"


@contextmanager
def claimed(folder: Path) -> Generator[None, None, None]:
    """Claim a folder. It is created if missing, and removed afterwards if it was created and is still empty."""
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
    """Create the claim. Raises BlockingIOError if the process of another claim may still run."""
    while True:
        try:
            handle = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            with suppress(FileNotFoundError):  # another process removed it
                _remove_stale(file)
            continue
        with os.fdopen(handle, "wb") as claim:
            claim.write(json.dumps(_holder(os.getpid())).encode())
        return


def _remove_stale(file: Path) -> None:
    """Remove a claim whose process has ended, or raise BlockingIOError. Other processes may remove it at the same time,
    so it is moved aside first, and moved back if it is no longer the claim that was read."""
    seen = file.read_bytes()
    try:
        held = cast("dict[str, object]", json.loads(seen))
        pid, host = int(str(held["pid"])), held["host"]
        here = host == platform.node()
        stale = here and (not files.is_running(pid) or _holder(pid)["start"] != held["start"])
        who = f"process {pid}" + ("" if here else f" on {host}")
    except (ValueError, TypeError, KeyError):  # another process is still writing it
        stale, who = False, "another process"
    if not stale:
        raise BlockingIOError(
            f"{file.parent} is being written to by {who}: wait for it, or give --out another folder "
            f"(if no such process runs, delete {file})"
        )
    aside = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}{files.STRAY}")
    file.rename(aside)
    if aside.read_bytes() != seen:
        aside.rename(file)
    else:
        aside.unlink()


def _holder(pid: int) -> dict[str, object]:
    """The content of a claim. Pids are reused, so it has the start of the process too, in clock ticks after boot."""
    try:
        start = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        start = None
    return {"pid": pid, "host": platform.node(), "start": start}


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders from the innermost to the outermost, as far as they are empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()
