"""Two sites of 64 states each: distributions on a grid, exact targets by enumeration, distances, and heat maps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Generator, Tensor

from tokensteer.core.particles.result import Result
from tokensteer.core.steering.steering import Steering
from tokensteer.core.twists.estimators import Value
from tokensteer.core.twists.ramps import end as end_ramp
from tokensteer.tasks.common.png import write_png
from tokensteer.testing.exact import enumerate_steering

STATES = 64
MASK = STATES
SAMPLES = 2000
"""Particles of a population in the paper."""
REPEATS = 16  # sets of exact draws behind a floor
FEWEST = 500
"""Samples of a set whose distance to the target is measured, at least."""


def coordinates() -> Tensor:
    """The coordinate of each state, (64,), from -6 to 6."""
    return 12.0 * (torch.arange(STATES, dtype=torch.float64) / (STATES - 1) - 0.5)


@dataclass(frozen=True)
class Target:
    """The exact target of a steering: its pmf (64, 64) and log-normaliser."""

    pmf: Tensor
    log_z: float

    def sample(self, count: int, generator: Generator | None = None) -> Tensor:
        """Independent draws, (count, 2)."""
        index = torch.multinomial(self.pmf.flatten(), count, replacement=True, generator=generator)
        return torch.stack([index // STATES, index % STATES], -1)


def target(steering: Steering) -> Target:
    """The target of the steering's own model, not of the data, by enumeration of all 65² states. It does not depend on
    estimates at t > 0 or on the proposal, so these are left out."""
    twist = steering.twist
    if twist is not None:
        nothing = Value(lambda x, t: torch.zeros(len(x), dtype=torch.float64))
        twist = replace(twist, ramp=end_ramp, estimator=nothing)
    enumeration = enumerate_steering(Steering(steering.model, twist))
    return Target(enumeration.target.view(STATES, STATES), enumeration.log_z)


def histogram(samples: Tensor, weights: Tensor | None = None) -> Tensor:
    """The pmf (64, 64) of samples (..., 2) with weights (...), equal if not given."""
    index = (samples[..., 0] * STATES + samples[..., 1]).flatten()
    mass = torch.ones(len(index), dtype=torch.float64) if weights is None else weights.flatten().double()
    counts = torch.zeros(STATES * STATES, dtype=torch.float64).index_add(0, index, mass)
    return (counts / counts.sum()).view(STATES, STATES)


def emd(p: Tensor, q: Tensor, smallest: float = 1e-10) -> float:
    """Earth mover's distance W1 between two pmfs (64, 64), in cells of the grid.

    It depends on p - q alone, which halves the problem. States that differ by less than `smallest` are left out: that
    changes the distance by less than 1e-6 here.
    """
    surplus, deficit = (p - q).clamp(min=0).flatten(), (q - p).clamp(min=0).flatten()
    moved = float(surplus.sum())
    origin, goal = (surplus > smallest).nonzero().squeeze(-1), (deficit > smallest).nonzero().squeeze(-1)
    if not len(origin) or not len(goal):
        return 0.0
    distance = torch.cdist(_cells(origin), _cells(goal))
    return moved * _transport(surplus[origin] / surplus[origin].sum(), deficit[goal] / deficit[goal].sum(), distance)


def _cells(index: Tensor) -> Tensor:
    return torch.stack([index // STATES, index % STATES], -1).double()


def _transport(origin: Tensor, goal: Tensor, cost: Tensor) -> float:
    """The optimal transport cost between two pmfs."""
    try:
        import ot  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise ImportError("the earth mover's distance needs POT: pip install 'tokensteer[eval]'") from error
    answer = cast(
        "tuple[float, dict[str, object]]",
        ot.emd2(origin.numpy(), goal.numpy(), cost.numpy(), numItermax=10_000_000, log=True),  # pyright: ignore[reportUnknownMemberType]
    )
    if answer[1]["warning"] is not None:
        raise RuntimeError(f"the optimal transport did not converge: {answer[1]['warning']}")
    return float(answer[0])


def floor(target: Target, count: int, generator: Generator | None = None) -> Tensor:
    """The EMD of `count` exact draws, `REPEATS` times: the least that a sampler of that size has on average."""
    draws = (target.sample(count, generator) for _ in range(REPEATS))
    return torch.tensor([emd(histogram(x), target.pmf) for x in draws], dtype=torch.float64)


def sets(populations: int, particles: int) -> int:
    """The number of sets whose distance is measured, which is large for few samples: each population, if it has at
    least 500 particles; smaller ones are joined to sets of so many, if there are as many."""
    full = populations * particles // FEWEST
    return min(populations, full) if full else populations if particles > 1 else 1


def in_sets(result: Result) -> list[Tensor]:
    """The pmf (64, 64) of each of the `sets` of a result."""
    weights = result.weights.double()
    parts = (part.tensor_split(sets(*weights.shape)) for part in (result.samples, weights))
    return [histogram(x, w) for x, w in zip(*parts, strict=True)]


def picture(ids: Tensor, file: str | Path, zoom: int = 6) -> None:
    """Samples (P, 2) as a heat map, y upwards."""
    write_png(file, 1.0 - ink(histogram(ids)).repeat_interleave(zoom, 0).repeat_interleave(zoom, 1))


def ink(pmf: Tensor) -> Tensor:
    """A pmf (64, 64) as a picture from 0 to 1, y upwards. The square root shows small shares."""
    share = pmf.T.flip(0)
    return (share / share.max()).sqrt()
