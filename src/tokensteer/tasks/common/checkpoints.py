"""Checkpoints in several files of limited size, for machines between which large files do not travel.

The files of one checkpoint are called NAME-STEP-K-of-N.safetensors and all hold the same header. Older ones are deleted
when the last file of a new one is written, so a process that is killed leaves at least one that is complete.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tokensteer import tensorfile

LIMIT = 15 * 2**20  # bytes in a file


@dataclass(frozen=True)
class Checkpoints:
    """Those called `name` in a folder."""

    folder: Path
    name: str

    def save(self, step: int, tensors: Mapping[str, Tensor], header: Mapping[str, Any], limit: int = LIMIT) -> None:
        """Write a checkpoint and delete the older ones."""
        old, parts = self._files(), _divided(tensors, limit)
        for place, part in enumerate(parts, 1):
            file = self.folder / f"{self.name}-{step}-{place}-of-{len(parts)}.safetensors"
            tensorfile.write(file, part, {**header, "step": step})
            old.pop(file, None)
        for file in old:
            file.unlink()

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The tensors and the header of the newest that is complete; None if there is none at all."""
        files = self._files()
        sets: dict[tuple[int, int], list[Path]] = {}
        for file, (step, _, count) in files.items():
            sets.setdefault((step, count), []).append(file)
        complete = [(step, count) for (step, count), found in sets.items() if len(found) == count]
        if not complete:
            if files:
                raise ValueError(f"{self.folder} holds no complete checkpoint of {self.name}: copy all of its files")
            return None
        tensors: dict[str, Tensor] = {}
        header: dict[str, Any] = {}
        for file in sets[max(complete)]:
            part, header = tensorfile.read(file)
            tensors |= part
        return tensors, header

    def remove(self) -> None:
        for file in self._files():
            file.unlink()

    def _files(self) -> dict[Path, tuple[int, int, int]]:
        """The files there are, with step, place and number of files."""
        pattern = re.compile(re.escape(self.name) + r"-(\d+)-(\d+)-of-(\d+)\.safetensors")
        found = sorted(self.folder.glob(f"{self.name}-*-of-*.safetensors")) if self.folder.is_dir() else []
        matched = {file: pattern.fullmatch(file.name) for file in found}
        return {file: (int(m[1]), int(m[2]), int(m[3])) for file, m in matched.items() if m is not None}


def _divided(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Parts of at most `limit` bytes, unless a single tensor is larger."""
    parts: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, value in tensors.items():
        size = value.numel() * value.element_size() + 200  # its entry in the header of the file
        if used + size > limit and parts[-1]:
            parts.append({})
            used = 0
        parts[-1][name] = value
        used += size
    return parts
