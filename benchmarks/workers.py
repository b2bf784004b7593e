"""Units on Ray workers of this machine: throughput of two against one, start-up, and the overhead of a unit.

python -m benchmarks.workers --units 16 --repeats 3
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tokensteer as ts
from tokensteer.workers.pool import Pool, ThisProcess, Workers
from tokensteer.workers.ray_pool import ray_pool
from tokensteer.workers.scatter import Call, SteeringWorker
from tokensteer.workers.units import UnitFolder, seed_of


def digits(steps: int) -> ts.Method:
    task = ts.load("digits", steps=steps)
    return ts.smc_base(task.model, task.tilt)


def small() -> ts.Method:
    """A run of about a millisecond."""
    denoiser = ts.from_logits(lambda x: torch.zeros(*x.shape, 3), 2, ignores_time=True)
    model = ts.Diffusion(denoiser, ts.Ancestral(2), ts.uniform_steps(2), ts.template(2, 2))
    return ts.smc_base(model, ts.Tilt(lambda x: x.sum(-1).float()))


CPU: list[float] = []
"""CPU seconds of the units of the last measurement."""


class Timed(SteeringWorker):
    """A worker that adds the CPU seconds of its process to each result."""

    def __call__(self, call: Call) -> Any:
        began = time.process_time()
        return super().__call__(call), time.process_time() - began


def seconds(pool: Pool, units: int, folder: UnitFolder | None = None) -> float:
    """The time of so many units, written to a folder if there is one."""
    calls = [Call(f"unit {k}", None, seed_of(0, f"unit {k}")) for k in range(units)]
    began = time.perf_counter()
    for call in calls:
        pool.submit(call)
    CPU.clear()
    for call, (result, cpu) in pool.finished():
        CPU.append(cpu)
        if folder is not None:
            folder.write(call.name, result, {})
    return time.perf_counter() - began


def warm(pool: Any, workers: int) -> None:
    """Wait until every worker has started and run a unit."""
    while len(pool.idle) < workers:
        seconds(pool, workers)
    seconds(pool, workers)


def _measure(pool: Pool, count: int, units: int, repeats: int, times: Any, used: Any) -> None:
    """Wall seconds of all units, and the CPU seconds of workers and of this process for them."""
    for _ in range(repeats):
        here = time.process_time()
        times[count].append(seconds(pool, units))
        used[count].append(sum(CPU) + time.process_time() - here)
        sys.stdout.write(
            f"{count} worker(s): {times[count][-1]:.2f} s for {units} units, {used[count][-1]:.2f} CPU s, "
        )
        sys.stdout.write(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("units", 16), ("particles", 32), ("populations", 4), ("steps", 50), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    make = partial(Timed, partial(digits, given.steps), given.particles, given.populations, None)
    tiny = partial(Timed, small, 4, 1, None)
    say = sys.stdout.write

    began = time.perf_counter()
    with ray_pool(Workers(2), make) as pool:
        seconds(pool, 1)
        say(f"start of Ray and the first unit: {time.perf_counter() - began:.1f} s\n")
        sys.stdout.flush()
    times: dict[int, list[float]] = {1: [], 2: []}
    used: dict[int, list[float]] = {1: [], 2: []}
    with ray_pool(Workers(1), make) as one:
        warm(one, 1)
        _measure(one, 1, given.units, given.repeats, times, used)
    with ray_pool(Workers(2), make) as two:
        warm(two, 2)
        _measure(two, 2, given.units, given.repeats, times, used)
    say(f"two workers {min(times[1]) / min(times[2]):.2f} x the throughput of one by the best wall times; ")
    say(f"CPU seconds of all units {min(used[1]):.2f} by one and {min(used[2]):.2f} by two, ")
    say(f"which on two idle cores is {2 * min(used[1]) / min(used[2]):.2f} x\n")
    sys.stdout.flush()

    many = 20 * given.units
    apart = seconds(ThisProcess(tiny()), many) / many
    with ray_pool(Workers(2), tiny) as pool, tempfile.TemporaryDirectory() as folder:
        warm(pool, 2)
        overhead = min(seconds(pool, many) for _ in range(given.repeats)) / many - apart / 2
        written = min(seconds(pool, many, UnitFolder(Path(folder))) for _ in range(given.repeats)) / many - apart / 2
    say(f"a unit of {1e3 * apart:.1f} ms: overhead {1e3 * overhead:.1f} ms, written {1e3 * written:.1f} ms\n")


if __name__ == "__main__":
    main()
