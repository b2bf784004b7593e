"""Going on with an unfinished run: its rows are kept and the other jobs are run, as an uninterrupted run would have
done. Each job has its own generator, so rows do not depend on one another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokensteer.app.given import differences
from tokensteer.app.runs.folder import CONFIG, RESULTS, Run, check_free, open_run
from tokensteer.app.runs.jobs import Job
from tokensteer.app.runs.prepare import Environment
from tokensteer.tasks.common.task import SHIPPED

MEND = "give the same options, --out another folder, or --force instead of --resume to replace the run"


def earlier(folder: Path, options: Mapping[str, Any]) -> Run | None:
    """The run in a folder, None if the folder is new or empty, or the run was stopped before it had results. Raises
    ValueError if the run has other options."""
    if not (folder / CONFIG).is_file():
        check_free(folder, force=False)
        return None
    run = open_run(folder) if (folder / RESULTS).exists() else None
    if run is None:
        check_free(folder, force=True)
        return None
    if "options" not in run.config:
        raise ValueError(f"{folder} cannot be resumed, its {CONFIG} has no options: {MEND}")
    if other := differences(run.config["options"], options):
        raise ValueError(f"{folder} has a run of other options: {'; '.join(other)}. {MEND.capitalize()}")
    for index, row in enumerate(run.rows):
        if not run.file(index).is_file():
            raise FileNotFoundError(f"{folder / RESULTS} lists {row['file']}, which is not there: {MEND}")
    return run


def check_same(run: Run, config: Mapping[str, Any]) -> None:
    """Raise ValueError unless a run has the jobs, versions and inputs of a config, so that its rows can be kept."""
    before, folder = run.config, run.folder
    for name in ("tokensteer", "torch"):
        was, now = before.get("versions", {}).get(name), config["versions"][name]
        if was != now:
            raise ValueError(f"{folder} was begun with {name} {was}, and this is {now}, which may differ: {MEND}")
    if before.get("machine") != config["machine"]:
        raise ValueError(f"{folder} was begun on {before.get('machine')}, and this is {config['machine']}: {MEND}")
    was, now = before.get("inputs", {}), config["inputs"]
    if changed := [name for name in now if was.get(name) != now[name]]:
        raise ValueError(f"the files of --{' and --'.join(changed)} have changed since {folder} was begun: {MEND}")
    jobs = before.get("jobs", ())
    planned = json.loads(json.dumps(config["jobs"]))  # without what the earlier run has resolved
    same = len(jobs) == len(planned) and all(known | job == known for known, job in zip(jobs, planned, strict=True))
    if not same or len(run.rows) > len(jobs):
        raise ValueError(f"{folder} has other jobs than these options plan: {MEND}")


def timed_before(jobs: Sequence[Job], run: Run, budget: str) -> list[Job]:
    """The jobs with the numbers of particles that were timed for an earlier run."""
    stored = run.config.get("jobs", ())
    if len(stored) != len(jobs):
        raise ValueError(f"{run.folder} has other jobs than these options plan: {MEND}")
    return [
        replace(job, extra=(*job.extra, budget), **{name: known.get(name) for name in ("particles", "why", "budget")})
        for job, known in zip(jobs, stored, strict=True)
    ]


def inputs(jobs: Sequence[Job], place: Environment) -> dict[str, str]:
    """Digests of the user's files that results depend on, by the option that names them."""
    found: dict[str, list[Path]] = {}
    for settings in {job.settings for job in jobs}:
        if settings.prompts is not None:
            found["prompts"] = [settings.prompts]
        if settings.schema is not None:
            found["schema"] = [settings.schema]
        if settings.reward is not None and (file := Path(settings.reward.rpartition(":")[0])).suffix == ".py":
            found["reward"] = [file]
    if place.weights != SHIPPED:
        found["weights"] = sorted(file for job in jobs for file in place.weights.glob(f"{job.task}-*.safetensors"))
    return {name: _digest(files) for name, files in found.items()}


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in dict.fromkeys(files):
        if file.is_file():
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]
