"""Rejuvenation and repair against plain SMC at about equal network rows.

python -m benchmarks.moves --help
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import tokensteer as ts
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.task import Setup


@dataclass(frozen=True)
class Options:
    task: str = "digits"
    goal: int | None = None
    kl: float = 1.0
    particles: int = 32
    """Of plain SMC; the others get about as many rows."""
    populations: int = 64
    steps: int = 32
    draws: int = 4
    device: str = "cpu"


def main(options: Options) -> None:
    setup = Setup(goal=options.goal, kl=options.kl, steps=options.steps, device=options.device)
    task = TASKS[options.task].make(setup)
    steering = ts.Steering(task.model, replace(task.tilt, draws=options.draws))
    table = Table(box=box.SIMPLE, title=f"{options.task}: {options.populations} populations")
    for title in (
        "method",
        "sd of log Z",
        "pooled log Z",
        "reward",
        "apart",
        "denoiser rows",
        "reward rows",
        "seconds",
    ):
        table.add_column(title)
    for name, path, particles in settings(steering, options):
        began, generator = time.perf_counter(), torch.Generator(options.device).manual_seed(0)
        found = ts.smc(path, particles, options.populations, generator=generator)
        z = (f"{float(found.log_z.std()):.2f}", "{:.2f} ± {:.2f}".format(*found.pooled_log_z))
        table.add_row(name, *z, *row(found.sample(2), found, steering, options, began))
    for share in (0.15, 0.3):
        began, generator = time.perf_counter(), torch.Generator(options.device).manual_seed(0)
        first = ts.smc(steering, options.particles // 4, options.populations, generator=generator)
        chain = ts.repair(first.sample()[:, 0], steering, share=share, generator=generator)
        rows = {part: count + chain.result.rows[part] for part, count in first.rows.items()}
        pair = chain.samples[[0, -1]].transpose(0, 1)
        name = f"N = {options.particles // 4}, repaired, share {share}, accepted {chain.accepted.double().mean():.2f}"
        table.add_row(name, "", "", *row(pair, replace(chain.result, rows=rows), steering, options, began))
    Console(width=160).print(table)


def settings(steering: ts.Steering, options: Options) -> Iterator[tuple[str, ts.FeynmanKac, int]]:
    n = options.particles
    yield f"N = {n // 4}", steering, n // 4
    yield f"N = {n}", steering, n
    for back in (1, 4, 8):
        yield f"N = {n // 2}, back {back}, 1 try", ts.Rejuvenated(steering, back, 1), n // 2
        yield f"N = {n // 4}, back {back}, 3 tries", ts.Rejuvenated(steering, back, 3), n // 4
        yield (
            f"N = {n // 2}, back {back}, 2 tries, every {2 * back}",
            ts.Rejuvenated(steering, back, 2, 2 * back),
            n // 2,
        )


def row(pair: Tensor, found: ts.Result, steering: ts.Steering, options: Options, began: float) -> list[str]:
    """The reward of the second of two draws (B, 2, L), and their distance over that of other populations' draws."""
    assert steering.twist is not None
    reward = steering.twist.reward(pair[:, 1]).double()
    own, other = ((pair[:, 0] != pair[:, 1].roll(k, 0)).double().mean() for k in (0, 1))
    counts = [f"{found.rows[part] / options.populations:.0f}" for part in ("denoiser", "reward")]
    error = float(reward.std()) / len(reward) ** 0.5
    return [
        f"{float(reward.mean()):.2f} ± {error:.2f}",
        f"{float(own / other):.2f}",
        *counts,
        f"{time.perf_counter() - began:.0f}",
    ]


if __name__ == "__main__":
    main(tyro.cli(Options))
