"""Data sets: labelled examples, arrays by name in .npz files, tensors as lists."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile
from zlib import error as ZlibError

import numpy as np
import torch
from torch import Tensor

from tokensteer import files


@dataclass(frozen=True)
class Examples:
    """ids (D, L) of a small integer type, labels (D,)."""

    ids: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device | str) -> Examples:
        return Examples(self.ids.to(device), self.labels.to(device))

    def take(self, index: Tensor) -> Examples:
        return Examples(self.ids[index], self.labels[index])

    @classmethod
    def joined(cls, parts: Iterable[Examples]) -> Examples:
        ids, labels = zip(*((part.ids, part.labels) for part in parts), strict=True)
        return cls(torch.cat(ids), torch.cat(labels))


def write(file: Path, **arrays: Any) -> None:
    """Write arrays completely or not at all."""

    def save(place: Path) -> None:
        with place.open("wb") as handle:  # given a name, numpy would add .npz to it
            np.savez_compressed(handle, **arrays)

    files.write_whole(file, save)


def write_one(file: Path, array: Any) -> None:
    """Write one array as .npy, completely or not at all."""

    def save(place: Path) -> None:
        with place.open("wb") as handle:  # given a name, numpy would add .npy to it
            np.save(handle, array, allow_pickle=False)

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
