"""Arrays by name in .npz files, written completely or not at all, and tensors as lists."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile
from zlib import error as ZlibError

import numpy as np
from torch import Tensor

from tokensteer import files


def write(file: Path, **arrays: Any) -> None:
    def save(place: Path) -> None:
        with place.open("wb") as handle:  # given a name, numpy would add .npz to it
            np.savez_compressed(handle, **arrays)

    files.write_whole(file, save)


def read(file: Path, names: Iterable[str], mend: str) -> dict[str, Any]:
    """The arrays called `names`. Raises ValueError with the file's name and the `mend` if it is damaged."""
    try:
        with np.load(file) as stored:
            missing = sorted(set(names) - set(stored.files))
            if missing:
                raise ValueError(f"it lacks {', '.join(missing)}")
            return {name: stored[name] for name in names}
    except (BadZipFile, ZlibError, ValueError, KeyError, TypeError, AttributeError, EOFError, RuntimeError) as error:
        raise ValueError(f"{file} is damaged, or no file of these arrays ({error}): {mend}") from error


def to_lists(table: Tensor) -> list[list[Any]]:
    """The rows of a tensor (P, K) as numbers."""
    return table.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
