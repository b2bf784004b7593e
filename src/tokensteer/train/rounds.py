"""Training in rounds, alone or together with other processes, that can be killed and gone on with.

Processes that train together hold the same weights. Each walks paths of its own, from a generator of its own, and all
learn from the mean of their gradients. They go through the rounds in step, but a kill may find some of them with a
checkpoint that others have not written yet: each keeps its last two, and all go on from the newest that all have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tokensteer import tensorfile as stored
from tokensteer.train.fit import Plan
from tokensteer.train.optim import Optimiser


class Trainee(Protocol):
    """What learns: how a round goes, how it is reported, and what a checkpoint must hold besides the networks."""

    def round(self, done: float, update: Callable[[], None]) -> None:
        """Gather gradients and `update`, once or more often, when a share `done` of the run is over."""
        ...

    def report(self, step: int, done: float, seconds: float) -> Any: ...
    def conclude(self, average: nn.Module, step: int, done: float, seconds: float) -> Any:
        """The report of the end, of what is returned: the averaged networks. It moves no generator."""
        ...

    def tensors(self) -> dict[str, Tensor]: ...
    def words(self) -> dict[str, Any]: ...
    def recall(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        """Take back tensors and words, nothing if the run is new."""
        ...


class Gathers(Protocol):
    """What processes that train together need of one another; accelerate's Accelerator is one."""

    @property
    def num_processes(self) -> int: ...
    @property
    def process_index(self) -> int: ...
    def reduce(self, tensor: Any, reduction: str = "sum") -> Any: ...


class InRounds(Protocol):
    """How many rounds there are, and how fast they go."""

    @property
    def rounds(self) -> int: ...
    @property
    def rate(self) -> float: ...
    @property
    def warmup(self) -> float: ...
    @property
    def seconds(self) -> float | None: ...
    @property
    def report_every(self) -> int: ...
    @property
    def save_every(self) -> int: ...


def run_rounds(
    student: Trainee,
    learning: Optimiser,
    plan: InRounds,
    *,
    checkpoint: Path | None = None,
    watch: Callable[[Any], None] | None = None,
    together: Gathers | None = None,
) -> None:
    """All rounds, or those that a checkpoint leaves."""
    pace = Plan(
        plan.rounds,
        rate=plan.rate,
        warmup=plan.warmup,
        seconds=plan.seconds,
        report_every=plan.report_every,
        save_every=plan.save_every,
    )
    group = None if together is None or together.num_processes == 1 else _Group(learning, together)
    if group is not None and checkpoint is not None:
        checkpoint = group.own(checkpoint)
    rounds, spent, before = learning.resume(checkpoint if group is None else group.newest(checkpoint))
    try:
        student.recall(before.tensors, before.header)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{checkpoint} is damaged ({error!r}): delete it to begin anew") from error
    if group is not None and not before.header:
        group.agree()
    began, seconds = time.perf_counter() - spent, spent
    while (done := pace.done(rounds, seconds)) < 1.0:

        def update(rate: float = pace.rate_at(done)) -> None:
            if group is not None:
                group.share()
            learning.learn(rate)

        student.round(done, update)
        rounds, seconds = rounds + 1, time.perf_counter() - began
        if group is not None:
            seconds = group.mean(seconds)  # the clock sets the pace and the end, which must be the same for all
        done = pace.done(rounds, seconds)
        if rounds % pace.report_every == 0 and done < 1.0:
            entry = student.report(rounds, done, seconds)
            if watch is not None:
                watch(entry)
        if checkpoint is not None and (rounds % pace.save_every == 0 or done >= 1.0):
            if group is not None and checkpoint.is_file():
                checkpoint.replace(_earlier(checkpoint))
            learning.save(checkpoint, rounds, seconds, student.tensors(), **student.words())
    entry = student.conclude(learning.average.module.eval(), rounds, done, seconds)
    if watch is not None:
        watch(entry)


def _earlier(checkpoint: Path) -> Path:
    return checkpoint.with_stem(f"{checkpoint.stem}-earlier")


class _Group:
    """A learning among others of its kind."""

    def __init__(self, learning: Optimiser, together: Gathers) -> None:
        self.learning, self.together = learning, together
        self.device = next(learning.net.parameters()).device

    def own(self, checkpoint: Path) -> Path:
        """Each has paths and a generator of its own, and so a file."""
        return checkpoint.with_stem(f"{checkpoint.stem}-{self.together.process_index}")

    def newest(self, checkpoint: Path | None) -> Path | None:
        """The newest checkpoint of this process that all others have the like of; None if there is one without any."""
        files = () if checkpoint is None else (checkpoint, _earlier(checkpoint))
        steps = {int(stored.read(file)[1].get("step", 0)): file for file in files if file.is_file()}
        everyone = self._all([*steps, *[0] * (2 - len(steps))])
        if not all(any(theirs) for theirs in everyone):
            return None
        common = set[int].intersection(*(set(theirs) for theirs in everyone)) - {0}
        if not common:
            raise ValueError(
                f"{checkpoint} and its like, of processes that trained together, are not of one time: delete them to "
                "begin anew"
            )
        return steps[max(common)]

    def _all(self, numbers: list[int]) -> list[list[int]]:
        """The numbers of every process, by the sum of tables in which each fills a row."""
        table = torch.zeros(self.together.num_processes, len(numbers), dtype=torch.int64, device=self.device)
        table[self.together.process_index] = torch.tensor(numbers, device=self.device)
        rows: Tensor = self.together.reduce(table, "sum")
        return [[int(number) for number in row] for row in rows]

    def agree(self) -> None:
        """All begin with the weights of the first, and with noise of their own. What is frozen is the same already."""
        index, net = self.together.process_index, self.learning.net
        for value in (*(p.data for p in net.parameters() if p.requires_grad), *net.buffers()):
            value.copy_(self.together.reduce(value if index == 0 else torch.zeros_like(value), "sum"))
        self.learning.generator.manual_seed(self.learning.generator.initial_seed() + index)

    def share(self) -> None:
        """The mean gradient of all, for each."""
        for parameter in self.learning.net.parameters():
            if parameter.grad is not None:
                parameter.grad = self.together.reduce(parameter.grad, "mean")

    def mean(self, number: float) -> float:
        return float(self.together.reduce(torch.tensor(number, dtype=torch.float32, device=self.device), "mean"))
