"""A pool of Ray actors, on this machine or on a cluster.

An actor that dies, with its process or its machine, is replaced, and its call is done by the next actor that is free.
Ray's own `max_restarts` and `max_task_retries` would keep a call with its actor, which may wait for a machine forever
while others are free. Calls have no side effects, so to do one twice is harmless.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

try:
    import ray as _ray  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError("several workers need Ray: pip install 'tokensteer[ray]'") from error

from tokensteer.workers.pool import Pool, Worker, Workers

ray: Any = _ray
PAUSE = 0.5
"""Seconds between two looks at the shares of calls."""
DEATHS = 3
"""How many workers a call may end before it is taken for the cause."""
STORE = 2**30
"""Bytes for results on their way, at most. Ray reserves three tenths of the memory unless it is told."""
LEAST_STORE = 80 * 2**20
"""Bytes that Ray insists on."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1",  # containers have a small /dev/shm
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # workers without a GPU of their own may share what there is
    # Ray would wait for workers that it starts beforehand, and forever for one that dies before it has registered.
    "RAY_prestart_worker_first_driver": "0",
}
"""Settings for machines without a network and with little memory: no usage reports, no advice on standard error, and no
worker that a run has not asked for."""
LOST = ("RayActorError", "ObjectLostError", "OutOfMemoryError", "NodeDiedError", "WorkerCrashedError")
"""Errors of Ray that mean that a worker, or what it returned, is gone."""
AUTHENTICATION = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Settings by which users decide how processes of Ray know one another."""


class Actor:
    """What runs in the process of an actor, which imports from the same places as the one that started it. The worker
    is made by the first call, so that its errors are those of a call: `made` holds a reference to the function, which
    Ray would otherwise read before. `share` is answered by a thread of its own."""

    worker: Worker | None

    def __init__(self, made: list[Any], folder: str, path: list[str]) -> None:
        self.made, self.worker = made, None
        with suppress(OSError):  # on another machine; paths are then those of that machine
            os.chdir(folder)
        sys.path += [place for place in path if place not in sys.path]

    def ready(self) -> int:
        return os.getpid()

    def call(self, call: Any) -> Any:
        worker = self.worker = self.worker or self._made()
        return worker(call)

    def _made(self) -> Worker:
        return ray.get(self.made[0])()

    def share(self) -> float:
        return 0.0 if self.worker is None else self.worker.share


@contextmanager
def ray_pool(
    workers: Workers, make_worker: Callable[[], Worker], on_shares: Callable[[list[float]], None] | None = None
) -> Generator[Pool, None, None]:
    """A pool of Ray actors. Ray is started unless it runs in this process already, and is stopped again."""
    begun = not ray.is_initialized()
    if begun:
        _start(workers)
    pool = None
    try:
        made = ray.put(make_worker)
        options = {"num_cpus": 1, "num_gpus": workers.gpus, "scheduling_strategy": "SPREAD"}
        kind = ray.remote(concurrency_groups={"share": 1})(Actor).options(**options)
        pool = RayPool(lambda: kind.remote([made], str(Path.cwd()), list(sys.path)), on_shares)
        for _ in range(_count(workers)):
            pool.add_worker()
        yield pool
    finally:
        if pool is not None:
            pool.close()
        if begun:
            ray.shutdown()


def _start(workers: Workers) -> None:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if workers.ray is not None:
        try:
            ray.init(address=workers.ray, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConnectionError(
                f"no Ray cluster answers at {workers.ray} ({str(error).splitlines()[0]}): start one with "
                "`ray start --head`, or use workers of this machine"
            ) from error
        return
    _make_token()
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else STORE
    ray.init(
        address="local",  # whatever RAY_ADDRESS says
        num_cpus=workers.count,
        include_dashboard=False,
        object_store_memory=max(LEAST_STORE, min(STORE, int(0.8 * free))),
        _node_ip_address="127.0.0.1",  # found out by a connection otherwise
        **quiet,
    )


def _make_token() -> None:
    """A token for processes on this machine. Ray would store one in the home folder, which containers need not have."""
    stored = Path(os.path.expanduser("~")) / ".ray" / "auth_token"
    if not stored.exists() and not any(name in os.environ for name in AUTHENTICATION):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _count(workers: Workers) -> int:
    """How many workers to start. Raises ValueError if not even one fits, or not all of them on this machine."""
    there = ray.cluster_resources()
    cpus, gpus = int(there.get("CPU", 0)), float(there.get("GPU", 0))
    fit = min(cpus, int(gpus / workers.gpus + 1e-9)) if workers.gpus else cpus
    if fit < 1 or (workers.ray is None and workers.count is not None and fit < workers.count and workers.gpus):
        raise ValueError(
            f"{workers.count or 1} workers with {workers.gpus:g} GPUs each do not fit: there are {gpus:g} GPUs and "
            f"{cpus} CPUs; use fewer workers, or fewer GPUs for each (a part such as 0.5 shares one)"
        )
    return fit if workers.count is None else workers.count


@dataclass
class RayPool:
    """Calls for actors that `start` starts. Each actor has one call at a time. `add_worker` may ask for more actors
    than there is room for: the others start when there is."""

    start: Callable[[], Any]
    on_shares: Callable[[list[float]], None] | None = None
    waiting: deque[Any] = field(default_factory=deque[Any])
    idle: list[Any] = field(default_factory=list[Any])
    starting: dict[Any, Any] = field(default_factory=dict[Any, Any])
    """Actors by the reference that is there when they have started."""
    running: dict[Any, tuple[Any, Any]] = field(default_factory=dict[Any, Any])
    """Actors and their calls, by the reference of the value."""
    deaths: dict[int, int] = field(default_factory=dict[int, int])
    """How many actors a call that is not done has ended, by its id."""
    failed_starts: int = 0
    looked: float = 0.0

    def submit(self, call: Any, first: bool = False) -> None:
        (self.waiting.appendleft if first else self.waiting.append)(call)

    def add_worker(self) -> None:
        actor = self.start()
        self.starting[actor.ready.remote()] = actor

    def finished(self) -> Iterator[tuple[Any, Any]]:
        while self.waiting or self.running:
            while self.waiting and self.idle:
                actor, call = self.idle.pop(), self.waiting.popleft()
                self.running[actor.call.remote(call)] = actor, call
            pause = None if self.on_shares is None else PAUSE
            done, _ = ray.wait([*self.running, *self.starting], num_returns=1, timeout=pause)
            for reference in done:
                if reference in self.starting:
                    self._started(reference)
                else:
                    yield from self._value(reference)
            if self.on_shares is not None and time.monotonic() - self.looked > PAUSE:
                self.on_shares(self._shares())
                self.looked = time.monotonic()

    def close(self) -> None:
        for actor in [*self.idle, *self.starting.values(), *(actor for actor, _ in self.running.values())]:
            with suppress(Exception):  # it is gone already
                ray.kill(actor)

    def _started(self, reference: Any) -> None:
        actor = self.starting.pop(reference)
        try:
            ray.get(reference)
        except ray.exceptions.RayError as error:
            self.failed_starts += 1
            if self.failed_starts >= DEATHS and not self.idle and not self.running:
                raise ChildProcessError(
                    f"no worker can be started ({_short(error)}): have the same versions of Python, Ray and tokensteer "
                    "on every machine"
                ) from error
            self.add_worker()
        else:
            self.failed_starts = 0
            self.idle.append(actor)

    def _value(self, reference: Any) -> Iterator[tuple[Any, Any]]:
        actor, call = self.running.pop(reference)
        try:
            value = ray.get(reference)
        except ray.exceptions.RayError as error:
            if not _is_loss(error):
                cause = getattr(error, "cause", None)
                if not isinstance(cause, Exception):
                    raise
                cause.add_note(str(error))  # has the traceback of the worker
                raise cause from None
            self._lost(actor, call, error)
        else:
            self.idle.append(actor)
            self.deaths.pop(id(call), None)
            yield call, value

    def _lost(self, actor: Any, call: Any, error: Exception) -> None:
        count = self.deaths[id(call)] = self.deaths.get(id(call), 0) + 1
        if count >= DEATHS:
            raise ChildProcessError(
                f"{call} has ended {count} workers ({_short(error)}): it may need more memory than there is, so use "
                "fewer particles or workers"
            ) from error
        with suppress(Exception):  # what it returned may be lost and not the actor itself
            ray.kill(actor)
        self.submit(call, first=True)
        self.add_worker()

    def _shares(self) -> list[float]:
        """The shares of the calls that are under way, as far as their actors answer at once."""
        asked = [actor.share.options(concurrency_group="share").remote() for actor, _ in self.running.values()]
        answered: list[Any] = ray.wait(asked, num_returns=len(asked), timeout=PAUSE)[0] if asked else []
        found: list[float] = []
        for reference in answered:
            with suppress(ray.exceptions.RayError):
                found.append(ray.get(reference))
        return found


def _is_loss(error: BaseException) -> bool:
    return any(kind.__name__ in LOST for kind in type(error).__mro__)


def _short(error: BaseException) -> str:
    """The last error that the text of an error names, which is its cause; else the beginning of the text."""
    named = re.findall(r"^[\w.]*(?:Error|Exception): .*$", str(error), re.MULTILINE)
    return " ".join((named[-1] if named else str(error)).split())[:200]
