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


def seconds(pool: Pool, units: int, folder: UnitFolder | None = None) -> float:
    """The time of so many units, written to a folder if there is one."""
    calls = [Call(f"unit {k}", None, seed_of(0, f"unit {k}")) for k in range(units)]
    began = time.perf_counter()
    for call in calls:
        pool.submit(call)
    for call, result in pool.finished():
        if folder is not None:
            folder.write(call.name, result, {})
    return time.perf_counter() - began


def warm(pool: Any, workers: int) -> None:
    """Wait until every worker has started and run a unit."""
    while len(pool.idle) < workers:
        seconds(pool, workers)
    seconds(pool, workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("units", 16), ("particles", 32), ("populations", 4), ("steps", 50), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    make = partial(SteeringWorker, partial(digits, given.steps), given.particles, given.populations, None)
    tiny = partial(SteeringWorker, small, 4, 1, None)
    say = sys.stdout.write

    began = time.perf_counter()
    with ray_pool(Workers(2), make) as pool:
        seconds(pool, 1)
        say(f"start of Ray and the first unit: {time.perf_counter() - began:.1f} s\n")
    alone, here, one, two = ThisProcess(make()), list[float](), list[float](), list[float]()
    seconds(alone, 1)
    for _ in range(given.repeats):  # in turn, so that a machine that changes its speed changes all of them
        here.append(seconds(alone, given.units))
        for count, times in ((1, one), (2, two)):
            with ray_pool(Workers(count), make) as pool:
                warm(pool, count)
                times.append(seconds(pool, given.units))
        say(f"this process {here[-1]:.2f} s, one worker {one[-1]:.2f} s, two {two[-1]:.2f} s, ")
        say(f"two / one {one[-1] / two[-1]:.2f}, load {os.getloadavg()[0]:.1f}\n")
    say(f"best of {given.repeats}: two workers {min(one) / min(two):.2f} x the throughput of one, ")
    say(f"{min(here) / min(two):.2f} x that of this process; {min(here) / given.units:.2f} s a unit\n")

    many = 20 * given.units
    apart = seconds(ThisProcess(tiny()), many) / many
    with ray_pool(Workers(2), tiny) as pool, tempfile.TemporaryDirectory() as folder:
        warm(pool, 2)
        overhead = min(seconds(pool, many) for _ in range(given.repeats)) / many - apart / 2
        written = min(seconds(pool, many, UnitFolder(Path(folder))) for _ in range(given.repeats)) / many - apart / 2
    say(f"a unit of {1e3 * apart:.1f} ms: overhead {1e3 * overhead:.1f} ms, written {1e3 * written:.1f} ms\n")


if __name__ == "__main__":
    main()
