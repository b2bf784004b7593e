"""What the report needs of a run folder: its rows with their numbers and their saved results."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Generator

from tokensteer import files
from tokensteer.app.runs import folder as runs
from tokensteer.app.runs import schema
from tokensteer.app.runs.answers import one_draw, some, unweighted, weighted
from tokensteer.app.runs.seeds import over_seeds, seeds_of
from tokensteer.core.particles.result import Result
from tokensteer.tasks.common.metrics import Measured

OTHER, AGAIN = "give the --out of a run", "run it again with --force"


@dataclass(frozen=True)
class Row:
    """One method with so many particles. What has no meaning or was not measured is NaN.

    `method` says all that tells it from other methods: `family`, and `variant` if there are several of it. `best` are
    the metrics of the best by reward, and `answer` what the method answers with: all its particles, or fewer, unless
    `weighted` as if they had no weights. `texts` are its samples as they were written down, if they are texts, and
    `failed` the prompts that gave none.
    """

    task: str
    about: str
    method: str
    family: str
    variant: tuple[str, ...]
    particles: int
    populations: int
    seed: int
    metrics: Mapping[str, Measured]
    best: Mapping[str, Measured]
    log_z: Measured
    seconds: float
    rows: Mapping[str, int]
    saved: Mapping[str, int]
    result: Result
    answer: Result
    weighted: bool
    job: Mapping[str, Any]
    training: Mapping[str, Any] | None = None
    texts: Sequence[Mapping[str, Any]] = ()
    failed: Sequence[Mapping[str, Any]] = ()
    seeds: int = 1


@dataclass(frozen=True)
class Run:
    """`joined` are the rows with those that differ in their seed alone as one, which has the samples of the first;
    `missing` names the rows that were planned and are not there."""

    folder: Path
    config: Mapping[str, Any]
    rows: Sequence[Row]
    joined: Sequence[Row]
    missing: Sequence[str] = ()

    @property
    def finished(self) -> bool:
        return not self.missing

    def tasks(self) -> list[str]:
        """In the order in which they were run."""
        return list(dict.fromkeys(row.task for row in self.rows))


def read(folder: Path) -> Run:
    """All of a run folder, or a ValueError of one line that says how to mend it."""
    try:
        run = runs.open_run(folder)
        if not run.rows:
            raise ValueError(f"{folder} has no finished row to report on")
        rows = [_row(run, index) for index in range(len(run.rows))]
        return Run(folder, run.config, rows, _joined(rows, run), [_planned(job) for job in run.missing])
    except (FileNotFoundError, ValueError) as error:
        known = _line(error)
        mend = OTHER if "is no run folder" in known or not runs.replaceable(folder) else AGAIN
        raise ValueError(known if "again" in known else f"{known}: {mend}") from error


def _planned(job: Mapping[str, Any]) -> str:
    """A row that is not there."""
    name = ", ".join([str(job.get("method", "a row")), *job.get("extra", ())])
    return f"{name}, N = {job.get('particles', '?')}, seed {job.get('seed', '?')}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _joined(rows: Sequence[Row], run: runs.Run) -> list[Row]:
    first = dict(zip((row["file"] for row in run.rows), rows, strict=True))
    if len({row.seed for row in rows}) < 2:
        return list(rows)
    return [_with_numbers(first[row["file"]], row) for row in over_seeds(run.rows)]


def _with_numbers(row: Row, stored: Mapping[str, Any]) -> Row:
    return replace(
        row,
        metrics=_metrics(stored["metrics"]),
        best=_metrics(stored.get("best")),
        log_z=_measured([stored["log_z"], stored["log_z_error"]]),
        seconds=float(stored["seconds"]),
        rows=stored["rows"],
        saved=stored["saved"],
        seeds=seeds_of(stored),
    )


def _row(run: runs.Run, index: int) -> Row:
    stored, result = run.rows[index], run.result(index)
    populations, particles = result.log_w.shape
    job: Mapping[str, Any] = stored.get("job", {})
    return Row(
        task=stored["task"],
        about=stored.get("about", ""),
        method=stored["method"],
        family=job.get("method", stored["method"]),
        variant=tuple(job.get("extra", ())),
        particles=particles,
        populations=populations,
        seed=stored["seed"],
        metrics=_metrics(stored["metrics"]),
        best=_metrics(stored.get("best")),
        log_z=_measured([stored["log_z"], stored["log_z_error"]]),
        seconds=float(stored["seconds"]),
        rows=stored["rows"],
        saved=stored["saved"],
        result=result,
        answer=_answer(result, stored.get("answer", "weighted")),
        weighted=stored.get("answer") != "unweighted",
        job=job,
        training=stored.get("training"),
        texts=_texts(run.written(index), result.log_w.numel()),
        failed=stored.get("failed", ()),
    )


def _texts(files_of: Sequence[Path], count: int) -> list[Mapping[str, Any]]:
    """The samples of a file of JSON lines, if there is one: so many, besides the prompts that failed."""
    told = next((file for file in files_of if file.suffix == ".jsonl"), None)
    if told is None:
        return []
    found = [entry for line in files.read_lines(told) if line for entry in _sample(told, line)]
    if len(found) != count:
        raise ValueError(f"{told} is damaged: it has {len(found)} samples, and its result has {count}")
    return found


def _sample(file: Path, line: str) -> list[Mapping[str, Any]]:
    """The sample of a line, or nothing if it tells of a failure."""
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged, a line is not valid JSON ({error})") from error
    if schema.fault(entry, schema.FAILED, {}) is None:
        return []
    if fault := schema.fault(entry, schema.SAMPLE, {}):
        raise ValueError(f"{file} is damaged: a line {fault}")
    return [entry]


def _answer(result: Result, kind: str) -> Result:
    """What the method answers with, of the populations that live; the same every time."""
    living = replace(some(result, result.alive), generator=Generator().manual_seed(0))
    answers = {answer.__name__: answer for answer in (weighted, unweighted, one_draw)}
    return answers.get(kind, weighted)(living)


def _metrics(stored: Any) -> dict[str, Measured]:
    known: dict[str, Any] = stored or {}
    return {str(name): _measured(value) for name, value in known.items()}


def _measured(stored: Any) -> Measured:
    mean, error = stored
    return Measured(_number(mean), _number(error))


def _number(stored: Any) -> float:
    return math.nan if stored is None else float(stored)
