"""Building the task and method of every job before the first is run, so that errors come before any work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokensteer.app.runs.choices import has_scheme, resampler, tilted, trigger
from tokensteer.app.runs.constrained import constrained, refused
from tokensteer.app.runs.jobs import Job
from tokensteer.app.runs.prompts import one_by_one, only
from tokensteer.app.runs.recipes import Recipe, recipe_of
from tokensteer.app.words.lookup import choose, file_of, find, raised
from tokensteer.core.numerics.batching import parse_memory
from tokensteer.core.proposals.amortised import Amortised, OtherHead, learned_parts
from tokensteer.core.proposals.gradient import Gradient
from tokensteer.core.steering.methods import Method
from tokensteer.core.steering.planner import Plan
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.task import SHIPPED, Setup, Task, check_device


@dataclass(frozen=True)
class Environment:
    """Where jobs are run. Raises ValueError on creation if the device or the memory limit cannot be used. On a
    `cluster` the device is that of its machines, and this one need not have it."""

    weights: Path = SHIPPED
    device: str = "cpu"
    memory: str | None = None
    cluster: bool = False

    def __post_init__(self) -> None:
        if not self.cluster:
            check_device(self.device)
            try:
                torch.zeros(1, device=self.device).item()
            except (RuntimeError, AssertionError) as error:
                known = ["cpu", *(f"cuda:{k}" for k in range(torch.cuda.device_count()))]
                there = f"there are {', '.join(known)}"
                raise ValueError(f"the device {self.device} cannot be used here: {there}") from error
        try:
            if self.memory is not None:
                parse_memory(self.memory)
        except OverflowError as error:
            raise ValueError(f"--memory is more than there can be, got {self.memory:.40}; try 8GiB") from error

    @property
    def here(self) -> Environment:
        """The environment of this process."""
        lacks = self.cluster and not torch.cuda.is_available()
        return replace(self, device="cpu" if lacks else self.device, cluster=False)


@dataclass(frozen=True)
class PreparedJob:
    """A job with its task and method, and the plan that chose the method if it was planned."""

    job: Job
    task: Task
    recipe: Recipe
    method: Method
    chosen: Plan | None = None

    @property
    def guides(self) -> bool:
        """Whether it has a scale of guidance, its own or that of the task's model."""
        return self.recipe.guides or self.task.guided_reference

    @property
    def tilts(self) -> bool:
        """Whether it uses the task's reward on the way or at the end."""
        return self.method.steering.twist is not None

    @property
    def reads_kl(self) -> bool:
        """Whether the kl counts: for a tilt, for powers that have no scale of guidance, or for the target that samples
        without a tilt are measured against."""
        return self.tilts or not self.guides or self.task.guidance is None

    @property
    def resamples(self) -> bool:
        """Whether it resamples by a scheme that --resample can replace."""
        return not self.recipe.sweeps and self.recipe.split is None and has_scheme(self.method)


def prepare(jobs: Sequence[Job], place: Environment) -> list[PreparedJob]:
    for job in jobs:
        if job.settings.rules and recipe_of(job.method).planned:
            raise refused(job.method)
    make = cache(make_task)  # jobs with the same setup share a task
    ready = [_prepared(job, make(setup_of(job, place), job.task)) for job in jobs]
    _check_used(ready)
    return ready


def one_by_one_prepared(jobs: Sequence[Job], place: Environment) -> Callable[[int], PreparedJob]:
    """The jobs by their numbers, each prepared when it is first asked for."""
    make = cache(make_task)

    def prepared(row: int) -> PreparedJob:
        return _prepared(jobs[row], make(setup_of(jobs[row], place), jobs[row].task))

    return cache(prepared)


def _check_used(ready: Sequence[PreparedJob]) -> None:
    """Raise if there is a setting that none of the methods uses. In a comparison the others leave it aside."""
    names = ", ".join(dict.fromkeys(one.job.method for one in ready))
    if any(one.job.settings.resample for one in ready) and not any(one.resamples for one in ready):
        raise ValueError(
            f"--resample replaces the resampling of SMC, and {names} has none or one of its own: leave it out, or "
            "choose a method such as smc-grad or fk-difference"
        )
    if any(one.job.settings.guidance for one in ready) and not any(one.guides for one in ready):
        raise ValueError(f"--guidance is the scale of cfg and smc-cfg, and {names} has none: leave it out")
    _check_reward_used(ready, names)
    if any(one.job.settings.clip for one in ready) and not any(one.recipe.clips for one in ready):
        raise ValueError(f"--clip bounds the gradient of smc-grad, prop-grad and auto, not of {names}: leave it out")
    scaled = any(learned_parts(one.method.steering.proposal) for one in ready)
    if any(one.job.settings.learned_scale for one in ready) and not scaled:
        raise ValueError(
            f"--learned-scale is that of smc-amot, prop-amot and smc-learned, and {names} learned nothing: leave it out"
        )
    if any(one.job.keep_states for one in ready) and all(one.recipe.split is not None for one in ready):
        raise ValueError(f"--keep-states stores the steps of particles, and {names} has chains instead: leave it out")
    if any(one.recipe.planned and (one.job.islands > 1 or one.job.split_prompts) for one in ready):
        raise ValueError("auto plans a row as a whole: leave out --islands and --split-prompts, or auto")


def _check_reward_used(ready: Sequence[PreparedJob], names: str) -> None:
    """Raise if there is a setting of the reward that none of the methods reads, as with guidance alone."""
    tilts = any(one.tilts for one in ready)
    read = {"kl": any(one.reads_kl for one in ready), "draws": tilts, "ramp": tilts, "noise": tilts, "smoothing": tilts}
    for name in read:
        if read[name] or all(getattr(one.job.settings, name) is None for one in ready):
            continue
        alone = any(one.recipe.guides and TASKS[one.job.task].rewards and not one.job.settings.reward for one in ready)
        more = "give --reward too (cifar and emoji have it beside guidance), or " if alone else ""
        raise ValueError(f"--{name} is that of the reward, which {names} does not use here: {more}leave it out")


def _prepared(job: Job, task: Task) -> PreparedJob:
    """The job, without the prompts for which it cannot be put together."""
    try:
        return put_together(job, task)
    except Exception as error:
        done, failed = one_by_one(task, lambda k, alone: put_together(job, alone), error)
        return put_together(job, only(task, list(done), failed))


def make_task(setup: Setup, name: str) -> Task:
    task = choose(name, TASKS, "task").make(setup)
    if task.prompted is None and (setup.prompts is not None or setup.prompt):
        raise ValueError(f"{name} reads no prompts: leave out --prompt{'' if setup.prompt else f's {setup.prompts}'}")
    if task.rule is None and setup.rules:
        raise ValueError(f"{name} has no texts: leave out --{' and --'.join(setup.rules)}, or use text")
    if task.guided is None and setup.guidance is not None:
        raise ValueError(f"{name} has no model that takes the goal as a label: leave out --guidance {setup.guidance:g}")
    if task.order is None and setup.order is not None:
        raise ValueError(f"{name} has one order, and cifar and emoji a choice: leave out --order {setup.order}")
    return task


@cache  # reading the file twice would give two functions
def reward_of(target: str) -> Callable[[list[str]], Any]:
    """The user's function of texts at module:function. Its errors and wrong return values raise a ValueError."""
    function: Any = find(target, "--reward takes module:function, such as mine.py:short, or a name")
    if isinstance(function, type) or not callable(function):
        kind = "a class" if isinstance(function, type) else f"of type {type(function).__name__}"
        raise ValueError(f"--reward {target} is {kind}: give a function from a list of texts to a number for each")

    @wraps(function)
    def reward(texts: list[str]) -> Tensor:
        try:
            given = function(texts)
        except (Exception, SystemExit) as error:
            raise ValueError(f"--reward {target} raised {raised(error, file_of(function))}") from error
        try:
            return torch.as_tensor(given, dtype=None if isinstance(given, Tensor) else torch.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            first = given[0] if isinstance(given, list | tuple) and given else given  # pyright: ignore[reportUnknownVariableType]
            raise ValueError(
                f"--reward {target} gives {first!r:.80}, which is no number: give a number for each text, in a list"
            ) from error

    return reward


def setup_of(job: Job, place: Environment) -> Setup:
    entry, asked = choose(job.task, TASKS, "task"), job.settings.of_task()
    own = None if asked.reward in entry.rewards else asked.reward
    reward = reward_of(own) if entry.judges_texts and own is not None else None
    return Setup(**vars(asked), device=place.device, weights=place.weights, reward_function=reward)


def put_together(job: Job, task: Task) -> PreparedJob:
    recipe = recipe_of(job.method)
    method = recipe.make(task, tilted(task, job.settings, job.seed, recipe.shares), job.particles)
    if job.settings.clip is not None and isinstance(method.steering.proposal, Gradient):
        gradient = replace(method.steering.proposal, clip=job.settings.clip)
        method = replace(method, steering=replace(method.steering, proposal=gradient))
    scale = job.settings.learned_scale
    if scale is not None and isinstance(method.steering.proposal, Amortised | OtherHead):
        if scale > 1 and isinstance(method.steering.proposal, Amortised):
            raise ValueError(f"--learned-scale must lie in (0, 1] on {task.name}, got {scale:g}: text alone takes more")
        learned = replace(method.steering.proposal, scale=scale)
        method = replace(method, steering=replace(method.steering, proposal=learned))
    if task.rule is not None:
        method = constrained(job.method, method, task.rule)
    if job.settings.trigger is not None:
        method = replace(method, when=trigger(job.settings.trigger))
    if recipe.sweeps and job.particles < 2:
        raise ValueError(f"{job.method} needs at least two particles, one of them pinned: got {job.particles}")
    ready = PreparedJob(job, task, recipe, method)
    if job.settings.resample is None:
        return ready
    scheme = resampler(job.settings.resample)
    return replace(ready, method=replace(method, resample=scheme)) if ready.resamples else ready
