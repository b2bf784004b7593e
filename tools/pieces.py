"""What the tools share that pack files for a machine that takes small files only. It needs Python alone.

Data are cut into NAME.part00, NAME.part01, ..., beside NAME.sha256 with the hash of all, as sha256sum writes it.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import tarfile
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path

PACKED = ".gz"


def cut(data: bytes, out: Path, name: str, size: int) -> list[Path]:
    """Write data as pieces of at most `size` bytes, and their hash; returns the pieces."""
    out.mkdir(parents=True, exist_ok=True)
    pieces: list[Path] = []
    for start in range(0, len(data), size):
        pieces.append(out / f"{name}.part{start // size:02d}")
        pieces[-1].write_bytes(data[start : start + size])
    (out / f"{name}.sha256").write_text(f"{hashlib.sha256(data).hexdigest()}  {name}\n")
    return pieces


def join(folder: Path, name: str) -> bytes:
    """The data that were cut into the pieces of this name."""
    data = b"".join(piece.read_bytes() for piece in sorted(folder.glob(f"{name}.part*")))
    if hashlib.sha256(data).hexdigest() != (folder / f"{name}.sha256").read_text().split()[0]:
        raise ValueError(f"{folder} does not hold all pieces as they were packed: copy them again")
    return data


def archive(contents: Mapping[str, bytes]) -> bytes:
    """Files by name as one archive, texts compressed."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as whole:
        for name, content in contents.items():
            plain = name.endswith((".csv", ".txt"))
            stored = gzip.compress(content, mtime=0) if plain else content
            entry = tarfile.TarInfo(name + PACKED if plain else name)
            entry.size = len(stored)
            whole.addfile(entry, io.BytesIO(stored))
    return buffer.getvalue()


def extract(data: bytes, folder: Path) -> list[str]:
    """Write the files of an archive to a folder; returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names: list[str] = []
    with tarfile.open(fileobj=io.BytesIO(data)) as whole:
        for entry in whole.getmembers():
            stored = whole.extractfile(entry)
            assert stored is not None
            content = stored.read()
            name = Path(entry.name).name
            content = gzip.decompress(content) if name.endswith(PACKED) else content
            names.append(name.removesuffix(PACKED))
            (folder / names[-1]).write_bytes(content)
    return names


def find(folder: Path, name: str) -> Path | None:
    """The file of a name in a folder or up to three below it, as `tasks.quality.published` finds those of packages."""
    depths = ("", "*/", "*/*/", "*/*/*/")
    return next((file for depth in depths for file in sorted(folder.glob(depth + name)) if file.is_file()), None)


def run(usage: str | None, **commands: Callable[..., object]) -> None:
    """Call the command that the first argument names with the others as paths; if they do not fit, show the usage."""
    name, *paths = sys.argv[1:] or [""]
    if name not in commands or len(paths) != len(signature(commands[name]).parameters):
        sys.exit(usage)
    commands[name](*map(Path, paths))
