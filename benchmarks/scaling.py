"""How long many prompts take on many GPUs, by simulation from measured times (docs/results/scaling.md).

Workers take units from one queue, one after the other. A unit is some prompts with all their particles. A worker first
starts: it loads Python and the networks. The head hands out units and writes their results one at a time, so it is busy
`head` seconds for each. A worker dies with a rate; its unit is done again, and it starts anew.

python -m benchmarks.scaling
python -m benchmarks.scaling --prompts 1000000 --prompt-seconds 0.2 --unit 64 --deaths 0.01 --gpus 8 64 512
"""

from __future__ import annotations

import heapq
import math
import sys
from dataclasses import dataclass, replace
from random import Random

import tyro
from tyro.conf import OmitArgPrefixes


@dataclass(frozen=True)
class Options:
    """Times in seconds."""

    prompts: int = 1_000_000
    prompt_seconds: float = 0.2
    """Of one prompt with its particles on one GPU, when many run together."""
    fixed_seconds: float = 0.3
    """Of a unit, however few its prompts: steps whose time does not depend on their rows."""
    units: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    """Prompts of a unit; each is tried."""
    spread: float = 0.1
    """Standard deviation of a unit's time over its mean."""
    head: float = 0.01
    """To hand out a unit and to write its result. Measured by benchmarks.workers."""
    start: float = 30.0
    """Of a worker, from asking for it to its first unit."""
    failed: float = 0.01
    """Probability that a unit is lost with its worker and done again."""
    kilobytes: float = 20.0
    """Of a prompt's result: samples, weights and genealogy."""
    megabytes_per_second: float = 200.0
    """That the head writes."""
    dollars: float = 3.0
    """Of a GPU for an hour."""
    gpus: tuple[int, ...] = (8, 64, 512)
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    seconds: float
    busy: float
    """The share of the GPUs' time in which they computed something that was kept."""
    head_busy: float


def simulate(options: Options, unit: int, gpus: int) -> Outcome:
    """The queue, event by event."""
    random = Random(f"{options.seed} {unit} {gpus}")
    count = math.ceil(options.prompts / unit)
    mean = options.fixed_seconds + unit * options.prompt_seconds
    written = options.head + unit * options.kilobytes / 1000 / options.megabytes_per_second
    free = [(options.start * (1 + 0.1 * random.random()), worker) for worker in range(min(gpus, count))]
    heapq.heapify(free)
    head = head_busy = useful = end = 0.0
    left = count
    while left:
        now, worker = heapq.heappop(free)
        begun = max(now, head)  # the head serves one worker at a time
        head = begun + written
        head_busy += written
        took = mean * max(0.2, random.gauss(1.0, options.spread))
        if random.random() < options.failed:
            heapq.heappush(free, (head + took * random.random() + options.start, worker))
            continue
        left -= 1
        useful += took
        heapq.heappush(free, (head + took, worker))
        end = max(end, head + took)
    return Outcome(end, useful / (gpus * end), head_busy / end)


def ideal(options: Options) -> float:
    """GPU seconds without any loss."""
    return options.prompts * options.prompt_seconds


def table(options: Options) -> str:
    head = ("GPUs", "prompts in a unit", "time", "times the ideal", "GPUs at work", "head at work", "cost")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for gpus in options.gpus:
        found = {unit: simulate(options, unit, gpus) for unit in options.units}
        best = min(found, key=lambda unit: found[unit].seconds)
        for unit, outcome in found.items():
            mark = "**" if unit == best else ""
            cost = outcome.seconds / 3600 * gpus * options.dollars
            lines.append(
                f"| {gpus} | {unit} | {mark}{written(outcome.seconds)}{mark} | "
                f"{outcome.seconds * gpus / ideal(options):.2f} | {outcome.busy:.0%} | {outcome.head_busy:.0%} | "
                f"${cost:,.0f} |"
            )
    return "\n".join(lines)


def limits(options: Options, unit: int) -> str:
    """The fastest that any number of GPUs can be, and where one more GPU in two is idle."""
    heads = math.ceil(options.prompts / unit) * options.head + options.prompts * options.kilobytes / 1e3 / (
        options.megabytes_per_second
    )
    gpus = 1
    while simulate(replace(options, failed=0.0), unit, gpus).busy > 0.5 and gpus < 2**16:
        gpus *= 2
    return f"Units of {unit}: the head alone takes {written(heads)}; half of the GPUs idle from about {gpus} on."


def written(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def main(options: OmitArgPrefixes[Options]) -> None:
    sys.stdout.write(table(options) + "\n")
    for unit in options.units:
        sys.stdout.write(limits(options, unit) + "\n")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
