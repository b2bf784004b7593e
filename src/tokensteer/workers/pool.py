"""A pool does calls and hands back their values, in any order. Here it is this process; `ray_pool` has many."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from tokensteer.core.numerics.domains import check_number, check_whole


class Worker(Protocol):
    """Does calls, one at a time, in a process of its own. It holds what calls share, such as networks."""

    def __call__(self, call: Any, /) -> Any: ...

    @property
    def share(self) -> float:
        """How much of the current call is done, from 0 to 1."""
        ...


class Pool(Protocol):
    """Calls go in by `submit`; `finished` yields each with its value until none is left. Calls may be submitted while
    it is read; those that are `first` come before the others."""

    def submit(self, call: Any, first: bool = False) -> None: ...

    def finished(self) -> Iterator[tuple[Any, Any]]: ...


@dataclass
class ThisProcess:
    """A pool of one worker, in this process."""

    worker: Worker
    waiting: deque[Any] = field(default_factory=deque[Any])

    def submit(self, call: Any, first: bool = False) -> None:
        (self.waiting.appendleft if first else self.waiting.append)(call)

    def finished(self) -> Iterator[tuple[Any, Any]]:
        while self.waiting:
            call = self.waiting.popleft()
            yield call, self.worker(call)


@dataclass(frozen=True)
class Workers:
    """How many workers there are, and where: on this machine, or on the Ray cluster at the address `ray`, which may be
    "auto". Without a `count` a cluster gets as many as fit. Each has `gpus` GPUs, or a part of one, to itself."""

    count: int | None = None
    ray: str | None = None
    gpus: float = 0.0

    def __post_init__(self) -> None:
        if self.count is not None:
            check_whole("workers", self.count)
        check_number("gpus_per_worker", self.gpus, "[0, inf)")
        if self.remote and find_spec("ray") is None:
            raise ImportError("several workers need Ray: pip install 'tokensteer[ray]'")
        if self.gpus and not self.remote:
            raise ValueError("gpus_per_worker is for several workers: leave it out, or say how many workers there are")

    @property
    def remote(self) -> bool:
        """Whether workers are processes of their own."""
        return self.ray is not None or (self.count or 1) > 1


def pool_of(
    workers: Workers, make_worker: Callable[[], Worker], on_shares: Callable[[list[float]], None] | None = None
) -> AbstractContextManager[Pool]:
    """A pool whose workers are made by `make_worker`, once in every process. `on_shares` is called now and then with
    the shares of the calls that are under way in other processes."""
    if not workers.remote:
        return nullcontext(ThisProcess(make_worker()))
    return import_module("tokensteer.workers.ray_pool").ray_pool(workers, make_worker, on_shares)  # loads Ray
