"""Resident memory over many runs in one process.

    PYTHONPATH=src python -m tests.faults.memory --count 1000

Configurations of the fuzzer are run in turn, with results that are looked at, stored and dropped, and with errors. Once
caches and the allocator are full, the resident memory must stay flat, and no run may leave a tensor behind.
"""

from __future__ import annotations

import argparse
import gc
import math
import resource
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

import tokensteer as ts
from tests.faults.choices import Choices
from tests.faults.fuzz import RUNS, shared_steering
from tests.faults.runs import OTHERS, Plan, draw_plan

SEED = 5
FLAT = 0.02  # the growth that is allowed, as a share of the resident memory


def draw_plans(number: int) -> list[Plan]:
    """Plans of different steerings that run."""
    found, group = list[Plan](), 0
    while len(found) < number:
        choices = Choices(SEED, group * RUNS)
        _, aim = shared_steering(SEED, group)
        group += 1
        if isinstance(aim, Exception):
            continue
        plan = draw_plan(choices, aim)
        if plan.sampler not in OTHERS:
            try:
                plan.run(0)
            except ValueError:  # refused, as the fuzzer knows
                continue
            found.append(plan)
    return found


@dataclass(frozen=True)
class Memory:
    """Bytes that are resident, and tensors that are alive."""

    resident: int
    tensors: int

    @classmethod
    def now(cls) -> Memory:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(pages * resource.getpagesize(), sum(type(thing) is Tensor for thing in gc.get_objects()))


def run(plans: list[Plan], number: int, folder: Path) -> None:
    """One run, and what people do with it; every tenth is stopped by an error."""
    plan = plans[number % len(plans)]

    def stop(record: ts.Record) -> None:
        if number % 10 == 9:
            raise InterruptedError

    try:
        result = plan.run(number, on_step=stop)
    except InterruptedError:
        return
    repr(result)
    result.pooled()
    if number % 7 == 0:
        result.save(folder / "result.safetensors")
        ts.Result.load(folder / "result.safetensors").html()


def growth(count: int, plans: int) -> tuple[Memory, Memory]:
    """The memory before and after so many runs, and as many as fill caches before."""
    drawn = draw_plans(plans)
    with tempfile.TemporaryDirectory() as folder:
        first = 10 * math.ceil(max(2 * plans, count // 5) / 10)  # tenths begin anew
        for number in range(first):
            run(drawn, number, Path(folder))
        before = Memory.now()
        for number in range(first, first + count):
            run(drawn, number, Path(folder))
        return before, Memory.now()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--plans", type=int, default=24, help="how many different steerings")
    options = parser.parse_args()
    before, after = growth(options.count, options.plans)
    share, more = after.resident / before.resident - 1.0, after.tensors - before.tensors
    sys.stdout.write(
        f"{options.count} runs: {before.resident / 2**20:.1f} MiB before and {after.resident / 2**20:.1f} MiB after "
        f"({share:+.2%}), {more:+d} tensors\n"
    )
    return int(share > FLAT or more > 0)


if __name__ == "__main__":
    sys.exit(main())
