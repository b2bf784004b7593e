"""Products of exact models against their exact targets.

    python -m benchmarks.products near
    python -m benchmarks.products strength
    python -m benchmarks.products steps

The first prints, for two to six sites, four choices of powers, without and with remasking, how far weighted samples are
from the target (total variation, TV) beside as many iid draws, and ESS/N at the end. Each line is of three products of
random tables and four sets of 64 populations of 64 particles for each. The second makes the tables more uneven, so that
sites depend on each other. The third measures ESS/N of the task `product` against the number of steps.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace

import torch
import tyro

import tokensteer as ts
from tests.helpers.product_toys import MDM, REMDM, ProductToy, first_opening, near
from tokensteer.tasks.common import grid
from tokensteer.tasks.common.metrics import measured, tv, tv_floor
from tokensteer.tasks.common.task import Setup
from tokensteer.tasks.product import task as product

TOYS = ("2x8", "3x6", "4x4", "5x3", "5x2", "6x2")
"""Numbers of sites and of their tokens: as many as can be enumerated in seconds."""
POWERS = ((1.0, 1.0), (2.0,), (1.5, -0.5), (0.7, 0.7))
KERNELS = {"MDM": MDM, "ReMDM": REMDM}
WAYS = (
    (ts.Guided(), ts.triggers.never),
    (ts.Guided(), ts.triggers.ess_below(0.5)),
    (ts.Guided(), ts.triggers.ess_below(0.9)),
    (ts.Enumerated(), ts.triggers.ess_below(0.5)),
)
STRENGTHS = (1.0, 1.5, 2.0, 3.0)


def near_floor(
    particles: int = 64,
    populations: int = 64,
    sets: int = 4,
    seeds: tuple[int, ...] = (0, 1, 2),
    toys: tuple[str, ...] = TOYS,
    kernels: tuple[str, ...] = tuple(KERNELS),
) -> None:
    """Toys of two to six sites."""
    for name in toys:
        length, tokens = map(int, name.split("x"))
        for powers in POWERS:
            for kernel in kernels:
                toy = ProductToy(tokens, length, powers, KERNELS[kernel])
                show(f"{name.replace('x', ' × ')} | {kernel}", toy, particles, populations, sets, seeds)


def strength(
    particles: int = 64,
    populations: int = 64,
    sets: int = 4,
    seeds: tuple[int, ...] = (0, 1, 2),
    lookahead: bool | None = None,
) -> None:
    """Four sites of four tokens, with tables that are more and more uneven."""
    for strength in STRENGTHS:
        for powers in POWERS:
            toy = ProductToy(4, 4, powers, strength=strength, lookahead=lookahead)
            show(f"4 × 4 | strength {strength:g}", toy, particles, populations, sets, seeds)


def show(name: str, toy: ProductToy, particles: int, populations: int, sets: int, seeds: tuple[int, ...]) -> None:
    """A row of the table: the ratio of each toy, the largest of all sets beside that of iid sets, ESS/N."""
    began = time.process_time()
    found = [near(replace(toy, seed=seed), ts.Guided(), particles, populations, sets, seed) for seed in seeds]
    ratios = ", ".join(f"{one.tv / one.floor:.2f}" for one in found)
    mean = statistics.fmean(one.tv / one.floor for one in found)
    worst, iid = max(one.worst for one in found), max(one.iid_worst for one in found)
    shares = ", ".join(f"{one.ess:.2f}" for one in found)
    write(
        f"| {name} | {', '.join(f'{power:g}' for power in toy.powers)} | {statistics.fmean(o.tv for o in found):.3f} | "
        f"{statistics.fmean(o.floor for o in found):.3f} | {mean:.2f} ({ratios}) | {worst:.2f}, {iid:.2f} | "
        f"{statistics.fmean(o.ess for o in found):.2f} ({shares}) | {max(abs(o.z) for o in found):.1f} | "
        f"{time.process_time() - began:.0f} |"
    )


def steps(particles: int = 2000, populations: int = 4, numbers: tuple[int, ...] = (10, 25, 50, 100, 200)) -> None:
    """ESS/N and TV of the task `product`, a ring times a cross, at three triggers of resampling, and with the proposal
    that weighs every token."""
    wanted = product.exact(Setup())
    for num_steps in numbers:
        made = product.task(Setup(num_steps)).guided
        assert made is not None, "the target is a product"
        model, cells = made(), []
        for proposal, when in WAYS:
            path, began = ts.Steering(model, None, proposal), time.process_time()
            result = ts.smc(path, particles, populations, when=when, generator=torch.Generator().manual_seed(0))
            pmfs = (grid.histogram(x, w) for x, w in zip(result.samples, result.weights, strict=True))
            far = measured(torch.tensor([tv(pmf, wanted) for pmf in pmfs]))
            share = float(result.ess[-1].mean()) / particles
            cells.append(f"{share:.2f}, {far.mean:.3f} ± {far.error:.3f}, {time.process_time() - began:.0f} s")
        write(f"| {num_steps} | {' | '.join(cells)} |")
    write(f"floor of the TV {tv_floor(wanted.flatten(), particles):.3f}")
    write(f"in many steps, without resampling: ESS/N {first_opening(product.ring(), product.cross()):.3f}")


def write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    tyro.extras.subcommand_cli_from_dict({"near": near_floor, "strength": strength, "steps": steps})
