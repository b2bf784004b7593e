"""A product of two densities on a grid of 64 × 64 cells, small enough to compute everything exactly.

p1 is a ring, p2 a cross of two diagonal stripes: both are in one piece, and their product has four separated modes. The
denoisers are the exact conditionals of the two tables, so nothing is trained.

The target p1^a · p2^b is reached in two ways. As a tilt of the model p1 by the reward r = (a - 1)·log p1 + b·log p2, it
is what every method of rewards samples. As a `Product` of two models, it is what cfg (each token from the normalised
product, without weights) and smc-cfg (with weights) sample. A kl other than 1 divides the reward, hence the powers.

Samples are compared with the product of the tables. A sampler of T steps opens both sites in the same step with
probability 1/T, and then independently; so its own target differs from the product of the tables by O(1/T), in total
variation 0.009 at T = 100 for either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Generator, Tensor

from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.product import Product
from tokensteer.core.models.template import template
from tokensteer.core.particles.result import Result
from tokensteer.core.steering.steering import Steering
from tokensteer.tasks.common import grid, tables
from tokensteer.tasks.common.metrics import Measured, ess_share, measured, tv, tv_floor, weighted
from tokensteer.tasks.common.png import tiled, write_png
from tokensteer.tasks.common.tables import Multilinear, TableDenoiser, with_masks
from tokensteer.tasks.common.task import Setup, Task

NAME = "product"
RADIUS, RING, STRIPE = 4.0, 0.5, 1.0
"""The ring's radius and the standard deviations of ring and stripes, where the grid is 12 wide."""
UNIFORM = 1e-4
"""The share of a uniform density in both: logs are finite everywhere."""
Powers = tuple[float, float]


def ring() -> Tensor:
    """p1, (64, 64)."""
    x, y = _places()
    return _pmf(-((x.square() + y.square()).sqrt() - RADIUS).square() / (2 * RING**2))


def cross() -> Tensor:
    """p2, (64, 64)."""
    x, y = _places()
    stripes = torch.stack([-(x - y).square(), -(x + y).square()]) / (2 * STRIPE**2)
    return _pmf(stripes.logsumexp(0))


def _places() -> tuple[Tensor, Tensor]:
    x, y = torch.meshgrid(grid.coordinates(), grid.coordinates(), indexing="ij")
    return x, y


def _pmf(log_density: Tensor) -> Tensor:
    return (1.0 - UNIFORM) * log_density.flatten().softmax(0).view_as(log_density) + UNIFORM / log_density.numel()


def exact(setup: Setup, powers: Powers = (1.0, 1.0)) -> Tensor:
    """The product of the tables, (64, 64), that a run with this setup is compared with."""
    return _product(*_effective(setup, powers))


def _product(a: float, b: float) -> Tensor:
    log_mass = a * ring().log() + b * cross().log()
    return log_mass.flatten().softmax(0).view_as(log_mass)


def _effective(setup: Setup, powers: Powers) -> Powers:
    """The powers of the target: the reward of the tilt is divided by kl, the model p1 itself is not."""
    kl = 1.0 if setup.kl is None else setup.kl
    return 1.0 + (powers[0] - 1.0) / kl, powers[1] / kl


@cache
def _emd_floor(powers: Powers, count: int) -> Measured:
    """The EMD of `count` exact draws."""
    target = grid.Target(_product(*powers), 0.0)
    return measured(grid.floor(target, count, Generator().manual_seed(0)))


def diffusion(setup: Setup, pmf: Tensor) -> Diffusion:
    """The masked diffusion with the exact denoiser of a positive pmf (64, 64)."""
    return setup.diffusion(TableDenoiser(Multilinear(with_masks(pmf))), grid.MASK, template(2, grid.MASK))


def task(setup: Setup, powers: Powers = (1.0, 1.0)) -> Task:
    """Towards p1^a · p2^b for `powers` (a, b)."""
    setup.refuse_reward(NAME)
    if setup.device != "cpu":
        raise ValueError(f"{NAME} runs on the CPU only, got the device {setup.device}: leave it out")
    if setup.guidance is not None:
        raise ValueError(f"the powers of {NAME} are 1 and 1/kl: give --kl and leave out --guidance {setup.guidance:g}")
    if setup.goal is not None:
        raise ValueError(f"{NAME} has a single goal: leave out --goal {setup.goal}")
    first, second = diffusion(setup, ring()), diffusion(setup, cross())
    score = (powers[0] - 1.0) * ring().log() + powers[1] * cross().log()
    tilt, wanted = tables.tilt(ring(), score, 1.0 if setup.kl is None else setup.kl), exact(setup, powers)

    @cache  # enumerated when it is first needed
    def log_z() -> float:
        return grid.target(Steering(first, tilt)).log_z

    def metrics(result: Result) -> Mapping[str, Measured]:
        found = grid.in_sets(result)
        count = result.log_w.numel() // len(found)
        return {
            "emd": measured(torch.tensor([grid.emd(pmf, wanted) for pmf in found])),
            "emd floor": _emd_floor(_effective(setup, powers), count),
            "tv": measured(torch.tensor([tv(pmf, wanted) for pmf in found])),
            "tv floor": Measured(tv_floor(wanted.flatten(), count), 0.0),
            "reward": weighted(result, score[tuple(result.samples.unbind(-1))]),
            "exact log_z": Measured(log_z(), 0.0),
            "ess": ess_share(result),
        }

    def picture(ids: Tensor, file: str | Path) -> None:
        draw([ring(), cross(), wanted, grid.histogram(ids)], file)

    return Task(
        NAME,
        "two tokens of 64 states, a ring times a cross of two stripes",
        first,
        tilt,
        metrics,
        picture,
        pictured=20_000,
        guided=lambda: Product((first, second), _effective(setup, powers)),
    )


def draw(pmfs: list[Tensor], file: str | Path, zoom: int = 3) -> None:
    """Heat maps side by side, y upwards: p1, p2, their product, and samples."""
    write_png(file, tiled(1.0 - torch.stack([grid.ink(pmf) for pmf in pmfs]), len(pmfs), zoom))
