"""Jobs played one after the other: prepared all before the first is run, each written down when it is done."""

from __future__ import annotations

import math
import platform
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial, wraps
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Generator, Tensor

import tokensteer
from tokensteer.app.runs import recipes as methods
from tokensteer.app.runs.folder import FORMAT, PICTURE, Writer
from tokensteer.app.runs.jobs import Job
from tokensteer.app.runs.recipes import Recipe
from tokensteer.app.words.environment import versions
from tokensteer.app.words.lookup import choose, find
from tokensteer.core.numerics.batching import parse_memory
from tokensteer.core.particles.gibbs import particle_gibbs
from tokensteer.core.particles.loop import summarise, sweep
from tokensteer.core.particles.path import Record
from tokensteer.core.particles.result import Result, with_rows
from tokensteer.core.steering.methods import Method
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.metrics import Measured, measured
from tokensteer.tasks.common.task import SHIPPED, Failure, Setup, Task, Trained, check_device


class Watch(Protocol):
    def begin(self, job: Job) -> None: ...
    def see(self, record: Record) -> None: ...
    def end(self, row: Mapping[str, Any]) -> None: ...


Found = TypeVar("Found")


def usable(device: str) -> None:
    """Say so unless numbers can be kept on the device and read back."""
    check_device(device)
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        known = ["cpu", *(f"cuda:{k}" for k in range(torch.cuda.device_count()))]
        raise ValueError(f"the device {device} cannot be used here: there are {', '.join(known)}") from error


def check_memory(memory: str) -> None:
    try:
        parse_memory(memory)
    except OverflowError as error:
        raise ValueError(f"--memory is more than there can be, got {memory:.40}; try 8GiB") from error


@dataclass(frozen=True)
class Environment:
    """Where jobs are played, which should not change what they find."""

    weights: Path = SHIPPED
    device: str = "cpu"
    memory: str | None = None

    def __post_init__(self) -> None:
        usable(self.device)
        if self.memory is not None:
            check_memory(self.memory)


@dataclass(frozen=True)
class PreparedJob:
    """A job with its parts put together."""

    job: Job
    task: Task
    recipe: Recipe
    method: Method


def prepare(jobs: Sequence[Job], place: Environment) -> list[PreparedJob]:
    """Put all parts together, so that what cannot work is said before anything is run."""
    make = cache(make_task)  # jobs of the same task share it
    return [_prepared(job, make(setup_of(job, place), job.task)) for job in jobs]


def _prepared(job: Job, task: Task) -> PreparedJob:
    """A job, without the prompts that already fail when its parts are tried out."""
    try:
        return put_together(job, task)
    except Exception as error:
        done, failed = one_by_one(task, lambda k, alone: put_together(job, alone), error)
        return put_together(job, _only(task, list(done), failed))


def make_task(setup: Setup, name: str) -> Task:
    task = choose(name, TASKS, "task").make(setup)
    if task.prompted is None and setup.prompts is not None:
        raise ValueError(f"{name} reads no prompts: leave out --prompts {setup.prompts}")
    if task.prompted is None and setup.reward is not None:
        raise ValueError(f"{name} is no task of texts, which a reward of your own could judge: leave out --reward")
    return task


@cache  # a file that is read twice gives two functions
def reward_of(target: str) -> Callable[[list[str]], Any]:
    """The function of texts at module:function, which is told what to give where it gives no numbers."""
    function: Any = find(target, "--reward takes module:function, such as mine.py:short")
    if isinstance(function, type) or not callable(function):
        kind = "a class" if isinstance(function, type) else f"of type {type(function).__name__}"
        raise ValueError(f"--reward {target} is {kind}: give a function from a list of texts to a number for each")

    @wraps(function)
    def reward(texts: list[str]) -> Tensor:
        try:
            given = function(texts)
        except (Exception, SystemExit) as error:
            raise ValueError(f"--reward {target} raised {_raised(error, function)}") from error
        try:
            return torch.as_tensor(given, dtype=None if isinstance(given, Tensor) else torch.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            first = given[0] if isinstance(given, list | tuple) and given else given  # pyright: ignore[reportUnknownVariableType]
            raise ValueError(
                f"--reward {target} gives {first!r:.80}, which is no number: give a number for each text, in a list"
            ) from error

    return reward


def _raised(error: BaseException, function: Any) -> str:
    """The error, and the last line of the function's file that led to it."""
    places = traceback.extract_tb(error.__traceback__)
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    place = [place for place in places if place.filename == file][-1:] or places[-1:]
    at = "".join(f" at {Path(frame.filename).name}:{frame.lineno}" for frame in place)
    return f"{type(error).__name__}{at}: {error}"


def setup_of(job: Job, place: Environment) -> Setup:
    choose(job.task, TASKS, "task")
    asked = job.settings.of_task()
    reward = None if asked.reward is None else reward_of(asked.reward)
    return Setup(**vars(asked), device=place.device, weights=place.weights, reward_function=reward)


def put_together(job: Job, task: Task) -> PreparedJob:
    recipe = methods.recipe_of(job.method)
    method = recipe.make(task, methods.tilted(task, job.settings, job.seed, recipe.shares), job.particles)
    if job.settings.trigger is not None:
        method = replace(method, when=methods.trigger(job.settings.trigger))
    if recipe.sweeps and job.particles < 2:
        raise ValueError(f"{job.method} needs at least two particles, one of them pinned: got {job.particles}")
    return PreparedJob(job, task, recipe, method)


# ---- one job


def run_one(ready: PreparedJob, place: Environment, watch: Callable[[Record], None]) -> Result:
    job, method = ready.job, ready.method
    steering, generator = method.steering, Generator(place.device).manual_seed(job.seed)
    populations = job.populations * steering.populations  # so many for each prompt
    before = steering.spent()
    steering.limit(None if place.memory is None else parse_memory(place.memory))
    if ready.recipe.sweeps:
        run = particle_gibbs(
            steering, ready.recipe.sweeps, job.particles, populations, when=method.when, generator=generator
        )
        return run.result
    if ready.recipe.split is not None:
        return ready.recipe.split(steering, job.particles, job.populations, generator=generator)

    def watched(record: Record) -> Record:
        watch(record)
        return record

    records = sweep(
        steering, job.particles, populations, resample=method.resample, when=method.when, generator=generator
    )
    return with_rows(summarise(map(watched, records), generator, steering.populations), before, steering.spent())


def retry_per_prompt(
    ready: PreparedJob, place: Environment, watch: Callable[[Record], None], error: Exception
) -> tuple[PreparedJob, Result]:
    """The job with its prompts run one by one after an error, and what came of those that work."""

    def run(k: int, alone: Task) -> Result:
        job = replace(ready.job, seed=(ready.job.seed + k) % 2**63)
        return run_one(put_together(job, alone), place, watch)

    done, failed = one_by_one(ready.task, run, error)
    return put_together(ready.job, _only(ready.task, list(done), failed)), side_by_side(list(done.values()))


def one_by_one(
    task: Task, attempt: Callable[[int, Task], Found], error: Exception
) -> tuple[dict[int, Found], list[Failure]]:
    """What an attempt finds for each prompt alone, and the prompts for which it fails, with the reason. If there are
    not several prompts the `error` with all together is raised, and if none works that of the last."""
    asked, done, failed = task.prompted, dict[int, Found](), list[Failure]()
    if asked is None or len(asked.prompts) < 2:
        raise error
    for k, prompt in enumerate(asked.prompts):
        try:
            done[k] = attempt(k, _only(task, [k]))
        except Exception as own:
            if k + 1 == len(asked.prompts) and not done:
                raise
            failed.append((prompt, " ".join(str(own).split())))
    return done, failed


def _only(task: Task, places: Sequence[int], failed: Sequence[Failure] = ()) -> Task:
    """The task with some of its prompts."""
    assert task.prompted is not None
    return replace(task.prompted.only(places, failed), tilt=task.tilt)


def side_by_side(results: Sequence[Result]) -> Result:
    """The populations of all results in one."""
    first = results[0]

    def all_of(name: str, axis: int) -> Any:
        parts = [getattr(result, name) for result in results]
        return None if parts[0] is None else torch.cat(parts, axis)

    def total(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
        return {name: sum(count.get(name, 0) for count in counts) for name in dict.fromkeys(chain(*counts))}

    return replace(
        first,
        **{name: all_of(name, 0) for name in ("samples", "log_w", "reward")},
        **{name: all_of(name, 1) for name in ("ess", "mean_reward", "ancestors", "ramp")},
        rows=total([result.rows for result in results]),
        saved=total([result.saved for result in results]),
    )


def answer_of(recipe: Recipe, result: Result) -> tuple[Result, Tensor]:
    """What a method answers with, and which populations it is of, (B,): of those that died there is none, unless the
    method looks at no weights."""
    kept = result.alive
    kept = torch.ones_like(kept) if recipe.answer is methods.unweighted else kept
    return recipe.answer(methods.some(result, kept)), kept


def measure(task: Task, answer: Result, kept: Tensor) -> dict[str, Measured]:
    """Metrics of an answer that is of the `kept` populations alone. Where prompts have lost different numbers of them
    each prompt is measured by itself, and the means over prompts are given."""
    if not kept.any():
        return {}
    if answer.reward is not None:  # a particle of no weight counts for nothing, whatever its reward
        answer = replace(answer, reward=torch.where(answer.log_w == -math.inf, 0.0, answer.reward))
    if task.prompted is None or kept.all():
        return dict(task.metrics(answer))
    own = [int(count) for count in kept.view(len(task.prompted.prompts), -1).sum(-1)]
    places = [k for k, count in enumerate(own) if count]
    if len({own[k] for k in places}) == 1:
        return dict(_only(task, places).metrics(answer))
    owner = torch.tensor([k for k in places for _ in range(own[k])], device=kept.device)
    found = [_only(task, [k]).metrics(methods.some(answer, owner == k)) for k in places]
    return {name: measured(torch.tensor([metrics[name].mean for metrics in found])) for name in found[0]}


def row_of(ready: PreparedJob, result: Result, answer: Result, kept: Tensor, seconds: float) -> dict[str, Any]:
    """What is said of a job that is done: `metrics` of its answer, and apart from them of the best by reward."""
    job, recipe, living = ready.job, ready.recipe, result.alive
    best = None if result.reward is None or not living.any() else methods.best(methods.some(result, living))
    # Without a twist there is no normaliser to estimate, and a pinned particle makes the estimate a biased one.
    estimates = ready.method.steering.twist is not None and not recipe.sweeps and recipe.estimates
    log_z = Measured(*result.pooled_log_z) if estimates else Measured(math.nan, math.nan)
    return {
        "task": job.task,
        "method": job.label,
        "particles": job.particles,
        "populations": len(result.log_w),
        "seed": job.seed,
        "about": ready.task.about,
        "answer": recipe.answer.__name__,
        "metrics": _numbers(measure(ready.task, answer, kept)),
        "best": None if best is None else _numbers(measure(ready.task, best, living)),
        "log_z": _number(log_z.mean),
        "log_z_error": _number(log_z.error),
        "rows": dict(result.rows),
        "saved": dict(result.saved),
        "seconds": round(seconds, 3),
        "job": job.stored(),
        **({"training": _training(recipe.trained(ready.task))} if recipe.trained is not None else {}),
        **_failures(ready.task),
        **_dead(ready, kept),
    }


def _dead(ready: PreparedJob, kept: Tensor) -> dict[str, Any]:
    """How many populations died, if any did, and the prompts that have lost all of theirs."""
    if kept.all():
        return {}
    asked = () if ready.task.prompted is None else ready.task.prompted.prompts
    lost = [prompt.id for prompt, own in zip(asked, kept.view(max(1, len(asked)), -1), strict=False) if not own.any()]
    return {"dead": int((~kept).sum())} | ({"dead prompts": lost} if lost else {})


def _failures(task: Task) -> dict[str, Any]:
    """The prompts that gave nothing, if there are any."""
    failed = () if task.prompted is None else task.prompted.failed
    listed = [{"prompt": prompt.text, "id": prompt.id, "error": reason} for prompt, reason in failed]
    return {"failed": listed} if listed else {}


def _training(trained: Trained) -> dict[str, Any]:
    """What it had taken to learn, and how that went."""
    card = trained.card
    return {name: card[name] for name in ("denoiser rows", "seconds", "device", "history")}


def _number(value: float) -> float | None:
    """For JSON, which knows no NaN."""
    return value if math.isfinite(value) else None


def _numbers(found: Mapping[str, Measured]) -> dict[str, list[float | None]]:
    return {name: [_number(value.mean), _number(value.error)] for name, value in found.items()}


# ---- all of them


def run_all(jobs: Sequence[PreparedJob], place: Environment, writer: Writer, watch: Watch) -> None:
    """Run, measure and write down one job after the other."""
    for ready in jobs:
        watch.begin(ready.job)
        began = time.perf_counter()
        try:
            result = run_one(ready, place, watch.see)
        except Exception as error:
            ready, result = retry_per_prompt(ready, place, watch.see, error)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        answer, kept = answer_of(ready.recipe, result)
        row = row_of(ready, result, answer, kept, seconds)
        writer.add(ready.job.file, row, result, _samples(ready, result, answer))
        watch.end(row)


def _samples(ready: PreparedJob, result: Result, answer: Result) -> dict[str, Callable[[Path], None]]:
    """How the samples of a job are written for people, by the suffix of the file."""
    task = ready.task
    files: dict[str, Callable[[Path], None]] = {
        suffix: partial(write, result) for suffix, write in task.written.items()
    }
    if task.picture is not None and len(answer.log_w):
        count = max(1, min(ready.job.particles, task.pictured // ready.job.populations))
        files[PICTURE] = partial(task.picture, answer.sample(count).flatten(0, 1)[: task.pictured])
    return files


def config(command: str, jobs: Sequence[Job], place: Environment) -> dict[str, Any]:
    """All that it takes to run it again."""
    shipped = place.weights == SHIPPED
    return {
        "format": FORMAT,
        "version": tokensteer.__version__,
        "command": command,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "weights": "shipped" if shipped else str(place.weights),
        "device": place.device,
        "memory": place.memory,
        "machine": torch.cuda.get_device_name(place.device) if place.device.startswith("cuda") else platform.machine(),
        "versions": versions(),
        "jobs": [job.stored() for job in jobs],
    }
