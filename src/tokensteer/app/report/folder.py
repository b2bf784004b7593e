"""What the report needs of a run folder: its rows with their numbers and their saved results."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Generator

from tokensteer.app import methods, runs
from tokensteer.app.seeds import over_seeds, seeds_of
from tokensteer.core.result import Result
from tokensteer.tasks.metrics import Measured

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
    """`joined` are the rows with those that differ in their seed alone as one, which has the samples of the first."""

    folder: Path
    config: Mapping[str, Any]
    rows: Sequence[Row]
    joined: Sequence[Row]

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
        return Run(folder, run.config, rows, _joined(rows, run))
    except (FileNotFoundError, ValueError) as error:
        known = _line(error)
        mend = OTHER if "is no run folder" in known else AGAIN
        raise ValueError(known if "again" in known else f"{known}: {mend}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _joined(rows: Sequence[Row], run: runs.Run) -> list[Row]:
    first = dict(zip((row["file"] for row in run.rows), rows, strict=True))
    if len({row.seed for row in rows}) < 2:
        return list(rows)
    try:
        return [_with_numbers(first[row["file"]], row) for row in over_seeds(run.rows)]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"the rows of {run.folder / runs.RESULTS} do not fit together ({error!r})") from error


def _with_numbers(row: Row, stored: Mapping[str, Any]) -> Row:
    return replace(
        row,
        metrics=_metrics(stored["metrics"]),
        best=_metrics(stored["best"]),
        log_z=_measured([stored["log_z"], stored["log_z_error"]]),
        seconds=_number(stored["seconds"]),
        rows=_counts(stored["rows"]),
        saved=_counts(stored["saved"]),
        seeds=seeds_of(stored),
    )


def _row(run: runs.Run, index: int) -> Row:
    stored = run.rows[index]
    try:
        for name in (stored["file"], *stored.get("written", ())):
            if not (run.folder / name).resolve().is_relative_to(run.folder.resolve()):
                raise ValueError(f"row {index} of {run.folder / runs.RESULTS} names a file outside its folder")
        result = run.result(index)
        populations, particles = result.log_w.shape
        job: Mapping[str, Any] = stored.get("job", {})
        return Row(
            task=str(stored["task"]),
            about=str(stored.get("about", "")),
            method=str(stored["method"]),
            family=str(job.get("method", stored["method"])),
            variant=tuple(str(word) for word in job.get("extra", ())),
            particles=particles,
            populations=populations,
            seed=int(stored.get("seed", 0)),
            metrics=_metrics(stored.get("metrics")),
            best=_metrics(stored.get("best")),
            log_z=_measured([stored.get("log_z"), stored.get("log_z_error")]),
            seconds=_number(stored.get("seconds")),
            rows=_counts(stored.get("rows", result.rows)),
            saved=_counts(stored.get("saved", result.saved)),
            result=result,
            answer=_answer(result, str(stored.get("answer", "weighted"))),
            weighted=stored.get("answer") != "unweighted",
            job=job,
            training=stored.get("training"),
            texts=_texts(run.written(index)),
            failed=stored.get("failed", ()),
        )
    except (KeyError, TypeError, AttributeError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else f"is damaged ({error})"
        raise ValueError(f"row {index} of {run.folder / runs.RESULTS} {what}") from error


def _texts(files: Sequence[Path]) -> list[Mapping[str, Any]]:
    """The samples of a file of JSON lines, if there is one."""
    lines = [line for file in files if file.suffix == ".jsonl" for line in file.read_text("utf-8").splitlines()]
    entries: list[Mapping[str, Any]] = [json.loads(line) for line in lines]
    return [entry for entry in entries if "text" in entry]


def _answer(result: Result, kind: str) -> Result:
    """What the method answers with, of the populations that live; the same every time."""
    living = replace(methods.some(result, result.alive), generator=Generator().manual_seed(0))
    answers = {answer.__name__: answer for answer in (methods.weighted, methods.unweighted, methods.one_draw)}
    return answers.get(kind, methods.weighted)(living)


def _metrics(stored: Any) -> dict[str, Measured]:
    known: dict[str, Any] = stored or {}
    return {str(name): _measured(value) for name, value in known.items()}


def _measured(stored: Any) -> Measured:
    mean, error = stored
    return Measured(_number(mean), _number(error))


def _number(stored: Any) -> float:
    return math.nan if stored is None else float(stored)


def _counts(stored: Mapping[str, Any]) -> dict[str, int]:
    return {str(name): int(count) for name, count in stored.items()}
