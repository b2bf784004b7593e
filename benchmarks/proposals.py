"""How much the weights of proposals vary on a task: the standard deviation of log Z at equal particles.

python -m benchmarks.proposals --help
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Literal

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

import tokensteer as ts
from tokensteer.app.runs.choices import tilted, trigger
from tokensteer.app.words.lookup import choose
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.settings import Settings
from tokensteer.tasks.common.task import Setup, Task

PROPOSALS: dict[str, ts.Proposal] = {
    "base": ts.FromModel(),
    "gradient, clip 3": ts.Gradient(clip=3.0),
    "gradient, clip 1": ts.Gradient(clip=1.0),
    "gradient, clip 3, tokens only": ts.Gradient(clip=3.0, tokens_only=True),
    "gradient, clip 1, tokens only": ts.Gradient(clip=1.0, tokens_only=True),
    "gradient, clip 1, tokens only, scale 0.7": ts.Gradient(clip=1.0, tokens_only=True, scale=0.7),
    "half the model, half that": ts.Mixture((ts.FromModel(), ts.Gradient(clip=1.0, tokens_only=True))),
}


@dataclass(frozen=True)
class Options:
    task: str = "digits"
    """A task with a differentiable reward."""
    goals: tuple[int, ...] = (1, 4, 8)
    """None (--goals without a number) for the default of the task, as where it has no goals."""
    seeds: int = 3
    particles: int = 16
    populations: int = 256
    """For each prompt or class, where the task has several."""
    steps: int = 50
    draws: int | None = None
    """The task's unless given: ten on digits and mnist."""
    noise: Literal["fresh", "shared"] | None = None
    """Of the draws, the task's unless given. Shared noise has the seed of the run."""
    smoothing: float | None = None
    """The share of a particle's last estimate that stays in its next one."""
    kl: float = 1.0
    device: str = "cpu"
    proposals: tuple[str, ...] = tuple(PROPOSALS)
    triggers: tuple[str, ...] = ("ess:0.5",)
    """When to resample, each with every proposal: ess:0.5:10 looks ten times in a run."""


def main(options: Options) -> None:
    variants = [
        (name, choose(name, PROPOSALS, "proposal"), when) for name in options.proposals for when in options.triggers
    ]
    table = Table(box=box.SIMPLE, title=f"{options.task}: {options.populations} populations of {options.particles}")
    columns = ("goal", "proposal", "trigger", "sd of log Z, each seed", "mean", "pooled log Z, each seed", "seconds")
    for title in columns:
        table.add_column(title)
    for goal in options.goals or (None,):
        setup = Setup(goal=goal, kl=options.kl, steps=options.steps, device=options.device)
        task = choose(options.task, TASKS, "task").make(setup)
        for name, proposal, when in variants:
            began = time.perf_counter()
            results = [steered(task, proposal, when, options, seed) for seed in range(options.seeds)]
            seconds = (time.perf_counter() - began) / options.seeds
            spread = [result.scatter for result in results]  # over populations of the same prompt or class
            each = ", ".join(f"{value:.3f}" for value in spread)
            mean = f"{statistics.fmean(spread):.3f}"
            row = ("" if goal is None else str(goal), name, when, each, mean, pooled(results), f"{seconds:.1f}")
            table.add_row(*row)
            Console(soft_wrap=True).print(*row, sep="  ")
    Console(width=140).print(table)


def steered(task: Task, proposal: ts.Proposal, when: str, options: Options, seed: int) -> ts.Result:
    tilt = tilted(task, Settings(draws=options.draws, noise=options.noise, smoothing=options.smoothing), seed)
    steering = ts.Steering(task.model, tilt, proposal)
    populations = options.populations * steering.resources.templates
    generator = torch.Generator(options.device).manual_seed(seed)
    return ts.smc(steering, options.particles, populations, when=trigger(when), generator=generator)


def pooled(results: list[ts.Result]) -> str:
    """log Z of each run with its error, nothing where each prompt or class has another."""
    if results[0].templates > 1:
        return ""
    return ", ".join("{:.2f} ± {:.2f}".format(*result.pooled_log_z) for result in results)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
