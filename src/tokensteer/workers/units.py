"""Units: parts of a run that are independent of one another, each known by its name.

The seed of a unit is made from the seed of the run and its name, and its result is one file. So results do not depend
on where, when and in which order units are run, and what is stored need not be run again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tokensteer import files
from tokensteer.core.particles.result import Result

LONGEST = 100
"""Characters of a name in the name of its file."""
SEEDS = 2**32
"""Different seeds of a generator on a CPU: torch ignores the higher bits."""


def seed_of(seed: int, name: str) -> int:
    """The seed of a unit, from the seed of the run and the name of the unit."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "big")


def seeds_of(seed: int, names: Iterable[str]) -> dict[str, int]:
    """The seeds of units. Raises ValueError if two units have the same name or by chance the same seed: their samples
    would be the same."""
    found: dict[str, int] = {}
    owner: dict[int, str] = {}
    for name in names:
        if name in found:
            raise ValueError(f"two units are called {name!r}: give each a name of its own")
        found[name] = own = seed_of(seed, name)
        if owner.setdefault(own, name) != name:
            raise ValueError(
                f"the units {owner[own]!r} and {name!r} have the same seed, one of {SEEDS:,}, and would have the same "
                f"samples: choose another seed than {seed}"
            )
    return found


def file_name(name: str) -> str:
    """The name of a unit's files: letters, digits, dots and dashes. A digest tells apart names that become alike."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in ".-_") else "-" for c in name).lstrip(".")[:LONGEST]
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class UnitFolder:
    """The results of finished units, a safetensors file for each."""

    folder: Path

    def read(self, name: str, populations: int, particles: int) -> tuple[Result, Mapping[str, Any]] | None:
        """The result of a unit, with its notes. None if it is not there, damaged, or of another size."""
        file = self._file(name)
        try:
            result, notes = Result.load(file), files.read_json(file.with_suffix(".json"))
        except (OSError, ValueError, RuntimeError, KeyError, TypeError, OverflowError):
            return None
        if not isinstance(notes, dict) or result.log_w.shape != (populations, particles):
            return None
        return result, cast("dict[str, Any]", notes)

    def write(self, name: str, result: Result, notes: Mapping[str, Any]) -> None:
        """Store a result. Its file is written last, so a unit without one is not done."""
        file = self._file(name)
        files.write_json(file.with_suffix(".json"), dict(notes))
        result.save(file)

    def remove(self, names: Iterable[str]) -> None:
        """Remove units; of each the result first, so that what is left is not taken for a unit that is done."""
        for name in names:
            file = self._file(name)
            file.unlink(missing_ok=True)
            file.with_suffix(".json").unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        return self.folder / f"{file_name(name)}.safetensors"
