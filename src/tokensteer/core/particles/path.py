"""Feynman-Kac paths: what the loop runs, and the records it yields.

A path starts particles, moves them and evaluates them. `Evaluation` holds what is known of each particle at one time;
it is permuted by resampling and never computed again.
"""

from __future__ import annotations

from collections.abc import Generator as Context
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Generic, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Generator, Tensor

from tokensteer.core.numerics.batching import Chunks, Meter, parse_memory
from tokensteer.core.numerics.domains import check_number, check_whole
from tokensteer.core.particles.resampling import log_mean_weight


@dataclass(frozen=True)
class Step:
    """The move from time t to time s < t; `index` counts moves from 0."""

    index: int
    t: float
    s: float

    def __post_init__(self) -> None:
        check_whole("Step.index", self.index, 0)
        check_number("Step.t", self.t, "[0, inf)")
        check_number("Step.s", self.s, "[0, inf)")


class Sites(Protocol):
    """What a kernel chose for each particle, shared by p and q, and indexed by particles: a boolean tensor (P, L), the
    sites that open, or an object of the kernel's own, such as a ranking."""

    def __getitem__(self, rows: Tensor, /) -> Self: ...


class Measure(Protocol):
    """What a particle's next state is drawn from. `sites` are the sites a kernel chose to open, if it chose any;
    `log_mass` (P,) is set by locally optimal proposals: the log of what they were normalised by, the weight to come."""

    @property
    def sites(self) -> Sites | None: ...
    @property
    def log_mass(self) -> Tensor | None: ...
    def sample(self, generator: Generator | None) -> Tensor: ...
    def log_prob(self, y: Tensor) -> Tensor: ...
    def take(self, rows: Tensor) -> Measure:
        """The same measure for a selection of particles."""
        ...


class Rows(Protocol):
    """Large per-particle data, stored so that selecting particles copies little."""

    def take(self, rows: Tensor) -> Rows: ...


@runtime_checkable
class JoinableRows(Rows, Protocol):
    """Rows that can be followed by others of the same kind."""

    def join(self, other: Self) -> Self: ...


@dataclass(frozen=True)
class Evaluation:
    """Everything computed at (x_t, t). It is permuted with the particles and never computed again.

    log_twist, reward and carry are (P,), a kernel's memory (P, ...); `proposed` is the prediction of a proposal's own
    network. `log_lookahead` (P,) is the part of the log-twist that no ramp scales; `ramp` (P,) is the lambda chosen by
    an adaptive ramp. `pending` (B, N): child log-weights before the new twist; set by the loop.
    """

    log_twist: Tensor
    prediction: Rows | None = None
    reward: Tensor | None = None
    gradient: Rows | None = None
    proposed: Rows | None = None
    carry: Tensor | None = None
    memory: Tensor | None = None
    log_lookahead: Tensor | None = None
    ramp: Tensor | None = None
    pending: Tensor | None = None

    def take(self, index: Tensor) -> Evaluation:
        kept = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: _take(value, index) for name, value in kept.items() if value is not None})

    def join(self, other: Evaluation) -> Evaluation:
        """These particles followed by the others, which were evaluated by the same path at the same time."""
        kept = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return replace(self, **{name: _join(name, *both) for name, both in kept.items()})


def _join(name: str, first: Tensor | Rows | None, second: Tensor | Rows | None) -> Tensor | Rows | None:
    if first is None and second is None:
        return None
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.cat([first, second])
    if isinstance(first, JoinableRows) and isinstance(second, JoinableRows) and type(first) is type(second):
        return first.join(second)
    kinds = " and ".join(type(value).__name__ for value in (first, second))
    raise TypeError(f"evaluations cannot be joined: their {name} is of kind {kinds}")


def _take(value: Tensor | Rows, index: Tensor) -> Tensor | Rows:
    return value[index] if isinstance(value, Tensor) else value.take(index)


class Moved(NamedTuple):
    """x_s (P, L), log p(x_s | x_t) - log q(x_s | x_t) (P,), and what `evaluate` needs of x_t when it evaluates x_s. The
    rest of the evaluation is freed before the networks are called again."""

    x: Tensor
    log_ratio: Tensor
    parent: Evaluation


@dataclass(frozen=True)
class Resources:
    """`templates` is the number of different starts; populations come in multiples of it. `meters` count network rows,
    by the name of the network; `budgets` limit the rows each network is given at once."""

    templates: int = 1
    meters: Mapping[str, Sequence[Meter]] = field(default_factory=dict[str, Sequence[Meter]])
    budgets: Sequence[Chunks] = ()

    def spent(self) -> Mapping[str, tuple[int, int]]:
        """Network rows computed and saved so far in this thread, by network."""
        counted = {name: meters for name, meters in self.meters.items() if meters}
        return {name: (sum(m.rows for m in of), sum(m.saved for m in of)) for name, of in counted.items()}

    @contextmanager
    def limited(self, memory: str | float | None) -> Context[None, None, None]:
        """Limit the memory each network takes at once, such as "8GiB"; None for what the device has free. The previous
        limits are restored: a reward may itself run `smc` with the same networks."""
        size = None if memory is None else parse_memory(memory)
        held = [budget.memory for budget in self.budgets]
        for budget in self.budgets:
            budget.memory = size
        try:
            yield
        finally:
            for budget, before in zip(self.budgets, held, strict=True):
                budget.memory = before


class FeynmanKac(Protocol):
    """What the loop runs. Rows are the particles of all populations, population by population."""

    @property
    def steps(self) -> Sequence[Step]: ...
    @property
    def resources(self) -> Resources: ...
    def start(self, rows: int, generator: Generator | None) -> Tensor: ...
    def evaluate(
        self, x: Tensor, t: float, generator: Generator | None, parent: Evaluation | None = None, weighed: bool = True
    ) -> Evaluation:
        """Evaluate (x_t, t). If not `weighed`, no weight is read there and any log-twist stored with the particle is
        correct."""
        ...

    def move(self, x: Tensor, evaluation: Evaluation, step: Step, generator: Generator | None) -> Moved: ...


@dataclass(frozen=True)
class Record:
    """The particles at one time, before any resampling there. `ancestors` index the record before this one."""

    step: Step | None
    x: Tensor
    log_w: Tensor
    log_increment: Tensor
    ancestors: Tensor
    evaluation: Evaluation

    @property
    def log_z(self) -> Tensor:
        return log_mean_weight(self.log_w)


PathT = TypeVar("PathT", bound=FeynmanKac)


class Wrapper(Generic[PathT]):
    """A path built on another one, `path`: what it does not change is that path's."""

    path: PathT

    @property
    def steps(self) -> Sequence[Step]:
        return self.path.steps

    @property
    def resources(self) -> Resources:
        return self.path.resources

    def start(self, rows: int, generator: Generator | None) -> Tensor:
        return self.path.start(rows, generator)


class Proposing(FeynmanKac, Protocol):
    """A path that can weight a move that it did not draw."""

    def propose(self, x: Tensor, evaluation: Evaluation, step: Step) -> Measure: ...
    def log_p(self, y: Tensor, x: Tensor, evaluation: Evaluation, step: Step, q: Measure) -> Tensor: ...
    def parent_of(self, evaluation: Evaluation) -> Evaluation:
        """`Moved.parent`, for a path that wraps this one."""
        ...
