"""Files that are complete or absent: every file of the package is written here.

A file is written under a temporary name beside its place, flushed to the disk and renamed. A process that is killed
leaves the old file or the new one, and perhaps a temporary file, which `remove_strays` deletes.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

STRAY = ".unfinished"
"""The suffix of temporary files. Their names are .NAME.PID-RANDOM.unfinished."""


def write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path, then rename what it wrote to `file`. Parent folders are created.

    Raises OSError naming `file` if the disk is full or the folder cannot be written to.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}{STRAY}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        temporary.chmod(0o644)  # safetensors creates files that only their owner can read
        _flush(temporary)
        temporary.replace(file)
        _flush(file.parent)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise OSError(f"{file} could not be written: {reason}") from error
    finally:
        _discard(temporary)


def write_text(file: Path, text: str) -> None:
    """Write UTF-8 text; line ends are kept as they are."""
    write_bytes(file, text.encode("utf-8"))


def write_bytes(file: str | Path, content: bytes) -> None:
    write_whole(Path(file), lambda place: place.write_bytes(content))


def write_json(file: Path, content: object) -> None:
    write_text(file, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def content_of(write: Callable[[Path], object]) -> bytes:
    """What `write` writes to the path that it is called with."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "content"
        write(file)
        return file.read_bytes()


def copy(source: Path, file: Path) -> None:
    """Copy the content of a file."""
    content = source.read_bytes()  # first: an error here is of the source, and not of the file that is written
    write_whole(file, lambda place: place.write_bytes(content))


def read_lines(file: Path) -> list[str]:
    """The lines of a UTF-8 text, which end with \\n or \\r\\n and nothing else: U+2028 and U+0085 belong to their line.

    Raises ValueError naming the file if it is not UTF-8.
    """
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8 ({error.reason} at byte {error.start})") from error
    return [line.removesuffix("\r") for line in text.split("\n")]


def read_json(file: Path) -> object:
    """The content of a JSON file. Raises ValueError naming the file if it is damaged."""
    try:
        return json.loads(file.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged, it is not valid JSON ({error})") from error


def remove_strays(folder: Path) -> None:
    """Delete temporary files that processes which no longer run have left in a folder."""
    for file in folder.glob(f".*{STRAY}"):
        owner = file.name.removesuffix(STRAY).rpartition(".")[2].partition("-")[0]
        if owner.isdecimal() and not is_running(int(owner)):
            _discard(file)


def is_running(pid: int) -> bool:
    """Whether a process of this machine exists."""
    if os.name == "nt":  # where os.kill(pid, 0) would interrupt it
        return _opens(pid)
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it exists and is somebody else's
        return True
    return True


def _opens(pid: int) -> bool:
    """Whether Windows opens a process, for its limited information alone."""
    kernel: Any = ctypes.__dict__["windll"].kernel32
    handle = kernel.OpenProcess(0x1000, False, pid)
    return bool(handle and kernel.CloseHandle(handle))


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk. Windows does not open folders."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # Windows flushes what may be written
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _discard(file: Path) -> None:
    with suppress(OSError):  # the folder is gone or read-only; the error that led here says so
        file.unlink(missing_ok=True)
