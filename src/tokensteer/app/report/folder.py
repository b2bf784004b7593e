"""A run folder as the report reads it: rows with their numbers, saved results and texts."""

from __future__ import annotations

import json
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
from tokensteer.app.words.numbers import loaded_pair
from tokensteer.core.particles.result import Result
from tokensteer.tasks.common.metrics import Measured

OTHER, AGAIN = "give the --out of a run", "run it again with --force"


@dataclass(frozen=True)
class Row:
    """One method with a number of particles. Numbers that are unknown are NaN.

    `method` is its full label: `family`, and `variant` if there are several of it. `best` has the metrics of the best
    particles by reward. `counts` has the number of values that a metric is the mean of, where it is not that of
    the populations. `answer` is the result that the method's metrics are measured on: all particles or some of
    them, with equal weights unless `weighted`; it is `exact` if it tends to the target as N grows. `texts` are its
    samples, if texts; `failed` are prompts that gave none.
    `plan` has the reasons of what pilots or timing chose for it, `learned_for` names another reward that its
    networks were learned for. `job` has the settings that were given, and `resolved` those it was run with. `mask` is
    the mask token of stored states, and `pieces` the text of other tokens, by id. `picture` is the file of its samples.
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
    counts: Mapping[str, int]
    log_z: Measured
    seconds: float
    rows: Mapping[str, int]
    saved: Mapping[str, int]
    seeds: int
    result: Result
    answer: Result
    weighted: bool
    exact: bool
    job: Mapping[str, Any]
    resolved: Mapping[str, Any]
    training: Mapping[str, Any] | None
    texts: Sequence[Mapping[str, Any]]
    failed: Sequence[Mapping[str, Any]]
    plan: Mapping[str, str]
    learned_for: str | None
    mask: int | None
    pieces: Mapping[str, str]
    picture: Path | None


@dataclass(frozen=True)
class Run:
    """`joined` has one row for rows that differ only in their seed, with the samples of the first; `missing` names the
    rows that were planned and are not there."""

    config: Mapping[str, Any]
    rows: Sequence[Row]
    joined: Sequence[Row]
    missing: Sequence[str]

    @property
    def finished(self) -> bool:
        return not self.missing

    def by_task(self) -> dict[str, tuple[list[Row], list[Row]]]:
        """The rows and the joined rows of each task, in the order in which tasks were run."""
        tasks = dict.fromkeys(row.task for row in self.rows)
        return {
            task: ([row for row in self.rows if row.task == task], [row for row in self.joined if row.task == task])
            for task in tasks
        }


def read(folder: Path) -> Run:
    """Read a run folder. Raises a ValueError of one line with the mend if it is not one, is damaged or is empty."""
    try:
        run = runs.open_run(folder)
        if not run.rows:
            raise ValueError(f"{folder} has no finished row to report on")
        rows = [_row(run, index) for index in range(len(run.rows))]
        return Run(run.config, rows, _joined(rows, run.rows), [_planned(job) for job in run.missing])
    except (FileNotFoundError, ValueError) as error:
        known = " ".join(str(error).split())
        mend = OTHER if "is no run folder" in known or not runs.replaceable(folder) else AGAIN
        raise ValueError(known if "again" in known else f"{known}: {mend}") from error


def _planned(job: Mapping[str, Any]) -> str:
    """The name of a row that is missing."""
    name = ", ".join([str(job.get("method", "a row")), *job.get("extra", ())])
    return f"{name}, N = {job.get('particles', '?')}, seed {job.get('seed', '?')}"


def _joined(rows: Sequence[Row], stored: Sequence[Mapping[str, Any]]) -> list[Row]:
    if len({row.seed for row in rows}) < 2:
        return list(rows)
    first = {row["file"]: rows[k] for k, row in enumerate(stored)}
    return [replace(first[row["file"]], **_numbers(row)) for row in over_seeds(stored)]


def _numbers(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a row that are averaged over seeds."""
    return {
        "metrics": _metrics(stored["metrics"]),
        "best": _metrics(stored.get("best") or {}),
        "log_z": loaded_pair([stored["log_z"], stored["log_z_error"]]),
        "seconds": float(stored["seconds"]),
        "rows": stored["rows"],
        "saved": stored["saved"],
        "seeds": seeds_of(stored),
        "counts": stored.get("counts", {}),
    }


def _metrics(stored: Mapping[str, Any]) -> dict[str, Measured]:
    return {name: loaded_pair(pair) for name, pair in stored.items()}


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
        **_numbers(stored),
        result=result,
        answer=_answer(result, stored.get("answer", "weighted")),
        weighted=stored.get("answer") != "unweighted",
        exact=stored.get("answer", "weighted") == "weighted",
        resolved=stored.get("resolved", {}),
        job=job,
        training=stored.get("training"),
        texts=_texts(run.written(index), result.log_w.numel()),
        failed=stored.get("failed", ()),
        plan=stored.get("plan", {}),
        learned_for=stored.get("learned for"),
        mask=stored.get("mask"),
        pieces=stored.get("pieces", {}),
        picture=run.picture(index) if "picture" in stored else None,
    )


def _texts(written: Sequence[Path], count: int) -> list[Mapping[str, Any]]:
    """The samples of a row's file of JSON lines, if there is one. Lines about failed prompts are skipped."""
    file = next((file for file in written if file.suffix == ".jsonl"), None)
    if file is None:
        return []
    entries = [_entry(file, line) for line in files.read_lines(file) if line]
    found = [entry for entry in entries if schema.fault(entry, schema.FAILED, {}) is not None]
    for entry in found:
        if fault := schema.fault(entry, schema.SAMPLE, {}):
            raise ValueError(f"{file} is damaged: a line {fault}")
    if len(found) != count:
        raise ValueError(f"{file} is damaged: it has {len(found)} samples, and its result has {count}")
    return found


def _entry(file: Path, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged, a line is not valid JSON ({error})") from error


def _answer(result: Result, kind: str) -> Result:
    """What the method answers with, of the populations that live. Seeded: it is the same every time."""
    living = replace(some(result, result.alive), generator=Generator().manual_seed(0))
    answers = {answer.__name__: answer for answer in (weighted, unweighted, one_draw)}
    return answers.get(kind, weighted)(living)
