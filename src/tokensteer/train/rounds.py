"""The training loop that `fit`, `fit_proposal` and `fit_drakes` share. It can be killed and resumed.

Processes that train together hold the same weights. Each walks its own paths with its own generator, and all apply the
mean of their gradients. They run the same rounds, but a kill may find some of them with a checkpoint that others have
not written yet: each keeps its last two, and all resume from the newest that all have.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Generator, Tensor, nn

from tokensteer import tensorfile
from tokensteer.train.optim import Optimiser, Pace


@dataclass(frozen=True)
class Report:
    """The state of a run. `loss` is the mean since the last report; the last report of a run is of the averaged
    network, which is returned, on new data."""

    step: int
    done: float
    loss: float
    seconds: float


Entry = TypeVar("Entry", bound=Report)


@dataclass(eq=False)
class Trainee(ABC, Generic[Entry]):
    """What one round does, and the state that a checkpoint holds besides the networks. `losses` has one tensor for each
    update since the last report."""

    entry: type[Entry] = field(init=False)
    losses: list[Tensor] = field(default_factory=list[Tensor], init=False)
    history: list[Entry] = field(default_factory=list[Entry], init=False)
    rows: int = field(default=0, init=False)

    @abstractmethod
    def round(self, done: float, update: Callable[[], None]) -> None:
        """Accumulate gradients and call `update`, once or more often. A share `done` of the run is over."""

    @abstractmethod
    def report(self, average: nn.Module, step: int, done: float, seconds: float) -> Entry:
        """The means since the last report; `average` are the averaged networks."""

    @abstractmethod
    def conclude(self, average: nn.Module, step: int, done: float, seconds: float) -> Entry:
        """The last report, of the averaged networks, which it may replace by earlier ones. It leaves the generator as
        it was."""

    def tensors(self) -> dict[str, Tensor]:
        return {"losses": torch.stack(self.losses)} if self.losses else {}

    def header(self) -> dict[str, Any]:
        return {"history": [asdict(entry) for entry in self.history], "rows": self.rows}

    def restore(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        """Take back what `tensors` and `header` gave; both are empty if the run is new."""
        self.history = [self.entry(**entry) for entry in header.get("history", ())]
        self.rows = header.get("rows", 0)
        self.losses = list(tensors.get("losses", ()))


class Gathers(Protocol):
    """What processes that train together need of one another; accelerate's Accelerator is one."""

    @property
    def num_processes(self) -> int: ...
    @property
    def process_index(self) -> int: ...
    def reduce(self, tensor: Any, reduction: str = "sum") -> Any: ...


def run_rounds(
    trainee: Trainee[Entry],
    net: nn.Module,
    plan: Pace,
    given: Mapping[str, Any],
    generator: Generator,
    *,
    faster: Sequence[tuple[nn.Module, float]] = (),
    checkpoint: Path | None = None,
    watch: Callable[[Entry], None] | None = None,
    together: Gathers | None = None,
) -> nn.Module:
    """Train `net` to the end of its plan and return its average, in eval mode.

    If the file `checkpoint` exists, the run resumes from it; `plan` and `given` must be those it was written with.
    """
    optimiser = Optimiser(net.train(), plan, given, generator, faster)
    group = None if together is None or together.num_processes == 1 else _Group(optimiser, together)
    if group is not None and checkpoint is not None:
        checkpoint = group.own(checkpoint)
    step, seconds, tensors, header = optimiser.resume(checkpoint if group is None else group.newest(checkpoint))
    device = next(net.parameters()).device
    try:
        trainee.restore({name: value.to(device) for name, value in tensors.items()}, header)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{checkpoint} is damaged ({error!r}): delete it to begin anew") from error
    if group is not None and not header:
        group.agree()

    def add(entry: Entry) -> None:
        trainee.losses.clear()
        if not math.isfinite(entry.loss):
            raise RuntimeError(f"the loss is {entry.loss} by step {entry.step}: lower the rate, {plan.rate}")
        trainee.history.append(entry)

    began = time.perf_counter() - seconds
    while (done := plan.done(step, seconds)) < 1.0:

        def update(rate: float = plan.rate_at(done)) -> None:
            if group is not None:
                group.share()
            optimiser.learn(rate)

        trainee.round(done, update)
        step, seconds = step + 1, time.perf_counter() - began
        if group is not None:
            seconds = group.mean(seconds)  # the clock sets the pace and the end, which must be the same for all
        done = plan.done(step, seconds)
        reports = step % plan.report_every == 0 and done < 1.0  # reading the loss makes a GPU wait: not at every step
        if reports:
            add(trainee.report(optimiser.average.module, step, done, seconds))
        if checkpoint is not None and (step % plan.save_every == 0 or done >= 1.0):
            if group is not None and checkpoint.is_file():
                checkpoint.replace(_earlier(checkpoint))
            optimiser.save(checkpoint, step, seconds, trainee.tensors(), **trainee.header())
        if reports and watch is not None:
            watch(trainee.history[-1])
    average = optimiser.average.module.eval()
    add(trainee.conclude(average, step, done, seconds))
    if watch is not None:
        watch(trainee.history[-1])
    return average


def _earlier(checkpoint: Path) -> Path:
    return checkpoint.with_stem(f"{checkpoint.stem}-earlier")


class _Group:
    """One of several processes that train together."""

    def __init__(self, optimiser: Optimiser, together: Gathers) -> None:
        self.optimiser, self.together = optimiser, together
        self.device = next(optimiser.net.parameters()).device

    def own(self, checkpoint: Path) -> Path:
        """The file of this process: each has its own paths and generator."""
        return checkpoint.with_stem(f"{checkpoint.stem}-{self.together.process_index}")

    def newest(self, checkpoint: Path | None) -> Path | None:
        """The newest checkpoint of this process whose step all others have too; None if a process has none."""
        files = () if checkpoint is None else (checkpoint, _earlier(checkpoint))
        steps = {int(tensorfile.read(file)[1].get("step", 0)): file for file in files if file.is_file()}
        everyone = self._all([*steps, *[0] * (2 - len(steps))])
        if not all(any(theirs) for theirs in everyone):
            return None
        common = set[int].intersection(*(set(theirs) for theirs in everyone)) - {0}
        if not common:
            raise ValueError(
                f"{checkpoint} and those of the other processes have no step in common: delete them to begin anew"
            )
        return steps[max(common)]

    def _all(self, numbers: list[int]) -> list[list[int]]:
        """The numbers of every process: the sum of tables in which each process fills its row."""
        table = torch.zeros(self.together.num_processes, len(numbers), dtype=torch.int64, device=self.device)
        table[self.together.process_index] = torch.tensor(numbers, device=self.device)
        rows: Tensor = self.together.reduce(table, "sum")
        return [[int(number) for number in row] for row in rows]

    def agree(self) -> None:
        """Give all processes the weights of the first, and a seed of their own. Frozen weights are equal already."""
        index, net = self.together.process_index, self.optimiser.net
        for value in (*(p.data for p in net.parameters() if p.requires_grad), *net.buffers()):
            value.copy_(self.together.reduce(value if index == 0 else torch.zeros_like(value), "sum"))
        self.optimiser.generator.manual_seed(self.optimiser.generator.initial_seed() + index)

    def share(self) -> None:
        """Replace gradients by their mean over processes."""
        for parameter in self.optimiser.net.parameters():
            if parameter.grad is not None:
                parameter.grad = self.together.reduce(parameter.grad, "mean")

    def mean(self, number: float) -> float:
        return float(self.together.reduce(torch.tensor(number, dtype=torch.float32, device=self.device), "mean"))
