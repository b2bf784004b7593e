"""A training loop for networks that take minutes on a GPU: by the clock or by steps, in one run or in several.

The rate follows warm-up and cosine over the whole time, of which a run is a part: a checkpoint has the seconds that
were spent, and the run that resumes it adds its own.
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Generator, Tensor

from tokensteer.tasks.common.best import Best
from tokensteer.tasks.common.checkpoints import Checkpoints
from tokensteer.tasks.common.learner import Learner
from tokensteer.tasks.common.training import say
from tokensteer.train import Plan

PAUSE = 5.0  # seconds between two lines of progress
CHECK = 60.0  # seconds between two checks on data that is not trained on
SAVE = 120.0  # seconds between two checkpoints
COMPILING = 3  # steps in which compiled functions may fail: the first compiles, the next ones capture
WARM = 300  # steps of warm-up at least, if the clock decides: compiling may take the time of the plan's warm-up


class Compiled:
    """A function that torch compiles if `wanted`. `give_up` returns to the function itself.

    If it is also `captured`, its kernels and those of its gradients are replayed as CUDA graphs; else a network of many
    small kernels waits for the host. It must be the only such function of a step, with arguments of fixed shapes."""

    def __init__(self, function: Callable[..., Tensor], wanted: bool, captured: bool = False) -> None:
        self._function, self._captured = function, wanted and captured
        mode = "reduce-overhead" if self._captured else None
        self._called: Callable[..., Tensor] = cast("Any", torch).compile(function, mode=mode) if wanted else function

    def __call__(self, *arguments: Any) -> Tensor:
        if not self._captured:
            return self._called(*arguments)
        cast("Any", torch).compiler.cudagraph_mark_step_begin()
        return self._called(*arguments).clone()  # the next replay overwrites what the graph returned

    def give_up(self) -> None:
        self._called, self._captured = self._function, False


class Trainee(ABC):
    """Learners by name, and what one step does with a batch, `batch_size` of what is `counted`. `compiled` are
    functions that compilation may fail for, and `given` is what a checkpoint must agree with. With `lowest`, the name
    of a number of `check`, the averaged weights of the first learner are kept from the check at which it was lowest, as
    `best`."""

    lowest: str | None = None
    best: Best
    learners: Mapping[str, Learner]
    compiled: tuple[Compiled, ...] = ()
    batch_size: int
    counted: str = "images"
    given: Mapping[str, Any]

    @abstractmethod
    def step(self, rate: float, done: float, generator: Generator) -> dict[str, Tensor]:
        """Update the networks once; returns numbers to show, the loss first."""

    def check(self) -> dict[str, float]:
        """Numbers of the averaged networks on data that is not trained on."""
        return {}


@dataclass(frozen=True)
class Stretch:
    """A run: `seconds` by the clock, or up to `last_step` of the plan. `horizon` is the time of the whole training in
    seconds if other runs follow. `resume` is the folder with a checkpoint of the run before, `checkpoints` where they
    are written, `compact` or exact."""

    checkpoints: Path | None = None
    resume: Path | None = None
    seconds: float | None = None
    horizon: float | None = None
    last_step: int | None = None
    compact: bool = True


@dataclass
class Progress:
    """Where a training stands."""

    step: int = 0
    seconds: float = 0.0
    shown: dict[str, float] = field(default_factory=dict[str, float])


def run(trainee: Trainee, plan: Plan, generator: Generator, name: str, stretch: Stretch) -> Progress:
    """Train until the time or the steps are over. Raises FloatingPointError if the loss is no number."""
    trainee.best = Best()
    progress = Progress() if stretch.resume is None else _resume(trainee, generator, name, stretch.resume)
    before, first = progress.seconds, progress.step
    last = plan.steps if stretch.last_step is None else stretch.last_step
    end, warm = math.inf, 1
    if stretch.seconds is not None:
        end = before + stretch.seconds
        plan, last = replace(plan, steps=10**9, seconds=stretch.horizon or end), 10**9
        end, warm = min(end, stretch.horizon or end), WARM
    start = shown = checked = saved = time.perf_counter()
    losses: list[dict[str, Tensor]] = []
    while progress.step < last and progress.seconds < end:
        done = plan.done(progress.step, progress.seconds)
        try:
            rate = plan.rate_at(done) * min(1.0, (progress.step + 1) / warm)
            losses.append(_detached(trainee.step(rate, done, generator)))
        except Exception as error:
            if progress.step >= first + COMPILING or not trainee.compiled:
                raise
            say(f"{name}: torch.compile failed ({str(error).splitlines()[0]}), so training is not compiled")
            _give_up(trainee)
            continue
        progress.step += 1
        now = time.perf_counter()
        progress.seconds = before + now - start
        if now - shown > PAUSE or progress.step == first + 1:
            _show(name, progress, losses, plan, len(losses) * trainee.batch_size / (now - shown), trainee.counted)
            losses, shown = [], time.perf_counter()
        if now - checked > CHECK:
            _check(trainee, name)
            checked = time.perf_counter()
        if stretch.checkpoints is not None and now - saved > SAVE:
            _save(trainee, generator, name, stretch, progress)
            saved = time.perf_counter()
    if losses:
        speed = len(losses) * trainee.batch_size / (time.perf_counter() - shown)
        _show(name, progress, losses, plan, speed, trainee.counted)
    progress.seconds = before + time.perf_counter() - start
    if trainee.lowest is not None:
        _check(trainee, name)
    if stretch.checkpoints is not None:
        _save(trainee, generator, name, stretch, progress)
    return progress


def _check(trainee: Trainee, name: str) -> None:
    found = trainee.check()
    say(f"{name}: {_words(found)}")
    if trainee.lowest is not None and trainee.lowest in found:
        trainee.best.see(found[trainee.lowest], next(iter(trainee.learners.values())).average)


def _give_up(trainee: Trainee) -> None:
    for compiled in trainee.compiled:
        compiled.give_up()
    for learner in trainee.learners.values():
        learner.forget()
    trainee.compiled = ()


def _detached(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in values.items()}


def _show(name: str, progress: Progress, losses: list[dict[str, Tensor]], plan: Plan, speed: float, unit: str) -> None:
    """A line with the speed and means since the last line."""
    progress.shown = {key: float(torch.stack([one[key] for one in losses if key in one]).mean()) for key in losses[-1]}
    say(
        f"{name}: {plan.done(progress.step, progress.seconds):4.0%}, step {progress.step}, {_words(progress.shown)}, "
        f"{speed:.0f} {unit}/s, {progress.seconds:.0f} s"
    )
    if not all(map(math.isfinite, progress.shown.values())):
        raise FloatingPointError(f"{name}: the loss is no number at step {progress.step}: train at a lower rate")


def _words(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {value:.4f}" for key, value in numbers.items())


def _save(trainee: Trainee, generator: Generator, name: str, stretch: Stretch, progress: Progress) -> None:
    assert stretch.checkpoints is not None
    tensors = {"generator": generator.get_state()}
    for role, learner in trainee.learners.items():
        tensors |= {f"{role}/{key}": value for key, value in learner.tensors(stretch.compact).items()}
    tensors |= trainee.best.stored()
    header = {
        "given": trainee.given,
        "lowest": trainee.best.value,
        "seconds": progress.seconds,
        "compact": stretch.compact,
        "updates": {role: learner.updates for role, learner in trainee.learners.items()},
    }
    Checkpoints(stretch.checkpoints, name).save(progress.step, tensors, header)


def _used(given: Any) -> Any:
    """Without settings that are 0, False or None, so that a checkpoint outlives a new setting that is off."""
    if not isinstance(given, Mapping):
        return given
    return {key: _used(value) for key, value in cast("Mapping[str, Any]", given).items() if value}


def _resume(trainee: Trainee, generator: Generator, name: str, folder: Path) -> Progress:
    found = Checkpoints(folder, name).load()
    if found is None:
        raise FileNotFoundError(f"there is no checkpoint of {name} in {folder}: give the folder that holds it")
    tensors, header = found
    was, now = header.get("given"), json.loads(json.dumps(trainee.given))  # as it is read again
    if _used(was) != _used(now):
        raise ValueError(f"the checkpoint of {name} in {folder} was made with {was}, and now it is {now}")
    try:
        for role, learner in trainee.learners.items():
            part = {key.removeprefix(f"{role}/"): v for key, v in tensors.items() if key.startswith(f"{role}/")}
            learner.restore(part, header["compact"], header["updates"][role])
        if generator.get_state().shape == tensors["generator"].shape:  # a GPU's state has another form than a CPU's
            generator.set_state(tensors["generator"])
        trainee.best = Best.of(header.get("lowest"), tensors)
        return Progress(int(header["step"]), float(header["seconds"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the checkpoint of {name} in {folder} is of another network ({error})") from error
