"""Rows of several run folders of one target, such as those of more particles or of further seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tokensteer.app.report.folder import Row, read
from tokensteer.tasks.common.metrics import measured

RESOLVED = ("steps", "goal", "reward", "kl", "guidance")
"""Settings of the target. A method that does not use one of them, such as the model alone, does not have it."""
GIVEN = ("remask", "prompt", "contains", "avoids", "pattern", "rhyme", "without", "characters")
"""Others, which are as they were given."""
READ = ("prompts", "schema", "reward")
"""Files that results depend on, which have a digest in the config."""


@dataclass(frozen=True, eq=False)
class Found:
    """A row, with the folder that it is from and the config of that folder."""

    folder: Path
    config: Mapping[str, Any]
    row: Row

    def __str__(self) -> str:
        return f"{self.row.method}, N = {self.row.particles}, seed {self.row.seed} in {self.folder}"

    @property
    def settings(self) -> dict[str, Any]:
        """All settings that the row was run with, but for its seed."""
        return {name: value for name, value in self.row.resolved.items() if name != "seed"}


def read_all(folders: Sequence[Path]) -> list[Found]:
    """The rows of run folders. Raises ValueError if they are of several targets, or one is there twice."""
    if not folders:
        raise ValueError("no run folder is given: give what `tokensteer compare TASK --out FOLDER` wrote")
    found: list[Found] = []
    for folder in folders:
        run = read(folder)
        found += [Found(folder, run.config, row) for row in run.rows]
    _check_same("task", [(one.row.task, one) for one in found])
    for name in READ:
        _check_same(f"file of {name}", [(one.config.get("inputs", {}).get(name), one) for one in found])
    for name in GIVEN:
        _check_same(name, [(one.row.job.get(name), one) for one in found])
    for name in RESOLVED:
        _check_same(name, [(one.settings[name], one) for one in found if name in one.settings])
    seen: dict[tuple[str, int, int], Found] = {}
    for one in found:
        known = seen.setdefault((one.row.method, one.row.particles, one.row.seed), one)
        if known is not one:
            raise ValueError(f"{known} is in {one.folder} too: leave one of them out")
    for group in by_size(found).values():
        for one in group[1:]:
            for name in {**group[0].settings, **one.settings}:
                _check_same(name, [(group[0].settings.get(name), group[0]), (one.settings.get(name), one)])
    return found


def _check_same(name: str, values: Sequence[tuple[Any, Found]]) -> None:
    for (before, one), (value, other) in pairwise(values):
        if value != before:
            raise ValueError(
                f"runs differ in {name}: {before} for {one} and {value} for {other}. Give folders of one target"
            )


def by_size(found: Sequence[Found]) -> dict[tuple[str, int], list[Found]]:
    """The rows of each method and number of particles, one for each seed."""
    groups: dict[tuple[str, int], list[Found]] = {}
    for one in found:
        groups.setdefault((one.row.method, one.row.particles), []).append(one)
    return groups


def over_seeds(group: Sequence[Found]) -> Row:
    """The row of a group: metrics are means over seeds with their standard errors, as in reports. That of a single seed
    is as it is, with errors over its populations."""
    rows = [one.row for one in group]
    if len(rows) == 1:
        return rows[0]
    shared = [name for name in rows[0].metrics if all(name in row.metrics for row in rows)]
    metrics = {name: measured(torch.tensor([row.metrics[name].mean for row in rows])) for name in shared}
    return replace(rows[0], metrics=metrics, seconds=sum(row.seconds for row in rows) / len(rows), seeds=len(rows))
