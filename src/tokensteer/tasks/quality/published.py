"""Files of published networks, found in the data folder and known by their SHA-256."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tokensteer.tasks.common.task import data_folder

DEPTHS = ("", "*/", "*/*/", "*/*/*/")
"""A file lies in the data folder or up to three folders below it, where unpacked packages have it."""


def find_any(name: str) -> Path | None:
    """The file of a name, or None."""
    return next((file for depth in DEPTHS for file in sorted(data_folder().glob(depth + name))), None)


def find_file(name: str, package: str) -> Path:
    """The file of a name. Raises FileNotFoundError, which says what to do, if it is not there."""
    file = find_any(name)
    if file is None:
        raise FileNotFoundError(
            f"there is no {name} in {data_folder()}: set TOKENSTEER_DATA to the folder that holds it (the package "
            f"{package} has it), or give the file"
        )
    return file


def check_file(file: Path, sha256: str) -> None:
    """Raise unless a file is there and has the SHA-256 expected."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}: give the file of the network's weights")
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != sha256:
        raise ValueError(
            f"{file} has the SHA-256 {digest} and not {sha256}, and files of networks can run code: fetch the file "
            "again, or pass sha256=... for one that you made and trust"
        )
