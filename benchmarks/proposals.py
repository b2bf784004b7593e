"""How much the weights of proposals vary on a task: the standard deviation of log Z at equal particles.

python -m benchmarks.proposals --help
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from itertools import product

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

import tokensteer as ts
from tokensteer.app.runs.choices import trigger
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.task import Setup

PROPOSALS: dict[str, ts.Proposal] = {
    "base": ts.FromModel(),
    "gradient, clip 3": ts.Gradient(clip=3.0),
    "gradient, clip 1": ts.Gradient(clip=1.0),
    "gradient, clip 3, tokens only": ts.Gradient(clip=3.0, tokens_only=True),
    "gradient, clip 1, tokens only": ts.Gradient(clip=1.0, tokens_only=True),
    "half the model, half that": ts.Mixture((ts.FromModel(), ts.Gradient(clip=1.0, tokens_only=True))),
}


@dataclass(frozen=True)
class Options:
    task: str = "digits"
    """A task with a differentiable reward."""
    goals: tuple[int, ...] = (1, 4, 8)
    seeds: int = 3
    particles: int = 16
    populations: int = 256
    steps: int = 50
    draws: int = 10
    kl: float = 1.0
    device: str = "cpu"
    proposals: tuple[str, ...] = tuple(PROPOSALS)
    triggers: tuple[str, ...] = ("ess:0.5",)
    """When to resample, each with every proposal: ess:0.5:10 looks ten times in a run."""


def main(options: Options) -> None:
    table = Table(box=box.SIMPLE, title=f"{options.task}: {options.populations} populations of {options.particles}")
    columns = ("goal", "proposal", "trigger", "sd of log Z, each seed", "mean", "pooled log Z, each seed", "seconds")
    for title in columns:
        table.add_column(title)
    for goal in options.goals:
        setup = Setup(goal=goal, kl=options.kl, steps=options.steps, device=options.device)
        task = TASKS[options.task].make(setup)
        tilt = replace(task.tilt, draws=options.draws)
        for name, when in product(options.proposals, options.triggers):
            steering, began = ts.Steering(task.model, tilt, PROPOSALS[name]), time.perf_counter()
            results = [
                steered(steering, options, when, torch.Generator(options.device).manual_seed(seed))
                for seed in range(options.seeds)
            ]
            spread = [float(result.log_z.std()) for result in results]
            pooled = ", ".join("{:.2f} ± {:.2f}".format(*result.pooled_log_z) for result in results)
            seconds = (time.perf_counter() - began) / options.seeds
            each = ", ".join(f"{value:.3f}" for value in spread)
            row = (str(goal), name, when, each, f"{statistics.fmean(spread):.3f}", pooled, f"{seconds:.1f}")
            table.add_row(*row)
            Console(soft_wrap=True).print(*row, sep="  ")
    Console(width=140).print(table)


def steered(steering: ts.Steering, options: Options, when: str, generator: torch.Generator) -> ts.Result:
    return ts.smc(steering, options.particles, options.populations, when=trigger(when), generator=generator)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
