"""Tensors and a JSON header in one safetensors file, complete or absent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from tokensteer import files

KEY = "tokensteer"
_UNREADABLE = (SafetensorError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, OSError)
"""What safetensors, torch and JSON raise for files that are damaged."""


def write(file: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write the file whole: a process that is killed leaves the old file."""
    named = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    words = {KEY: json.dumps(dict(header))}
    files.write_whole(file, lambda place: save_file(named, str(place), metadata=words))


def read(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors on the CPU, and the header. Raises ValueError naming the file if it is damaged or from elsewhere."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    try:
        with cast("Any", safe_open(str(file), framework="pt")) as stored:
            metadata: dict[str, str] = stored.metadata() or {}
            header: object = json.loads(metadata.get(KEY, "{}"))
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a dict)
    except _UNREADABLE as error:
        raise ValueError(f"{file} is damaged, or no safetensors file: {error}") from error
    if not isinstance(header, dict) or not header:
        raise ValueError(f"{file} was not written by tokensteer: it has no header of its own")
    return tensors, cast("dict[str, Any]", header)
