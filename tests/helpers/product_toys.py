"""Products of exact models of random tables, and how far weighted samples of them are from the exact target."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

import tokensteer as ts
from tokensteer.tasks.common.metrics import tv, tv_floor
from tokensteer.testing import Enumeration, TableDenoiser, enumerate_steering

MDM, REMDM = 0.0, 0.2
"""The largest share of open sites that a step masks again, as `Cap` has it."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class ProductToy:
    """∏ p_k^a_k for tables p_k = softmax(strength · normal numbers), in `steps` steps."""

    tokens: int
    length: int
    powers: tuple[float, ...]
    remask: float = MDM
    seed: int = 0
    steps: int = 16
    strength: float = 1.0
    lookahead: bool | None = None

    @cached_property
    def model(self) -> ts.Product:
        shape = len(self.powers), self.tokens**self.length
        tables = (self.strength * torch.randn(shape, generator=seeded(self.seed), dtype=torch.float64)).softmax(-1)
        kernel = ts.Ancestral(self.tokens, sigma=ts.Cap(self.remask)) if self.remask else ts.Ancestral(self.tokens)
        models = [
            ts.Diffusion(
                TableDenoiser(table.view([self.tokens] * self.length)),
                kernel,
                ts.uniform_steps(self.steps),
                ts.template(self.length, self.tokens),
            )
            for table in tables
        ]
        return ts.Product(models, self.powers, lookahead=self.lookahead)

    @cached_property
    def exact(self) -> Enumeration:
        return enumerate_steering(ts.Steering(self.model))

    def law(self, result: ts.Result) -> Tensor:
        """The weight of every clean sequence, in lexicographic order, with populations weighted by their Z."""
        cell = (result.samples * self.tokens ** torch.arange(self.length - 1, -1, -1)).sum(-1)
        weights = result.weights * result.log_z.softmax(0).unsqueeze(-1)
        return weights.new_zeros(self.tokens**self.length).scatter_add(0, cell.flatten(), weights.flatten())


@dataclass(frozen=True)
class Near:
    """The mean total variation (TV) of sets of weighted samples and the target, the expected TV of as many iid draws,
    the largest TV over that `floor` of the sets and of as many sets of iid draws, the final ESS/N, and the difference
    of log Z from the exact one in standard errors."""

    tv: float
    floor: float
    worst: float
    iid_worst: float
    ess: float
    z: float


def near(toy: ProductToy, proposal: ts.Proposal, particles: int, populations: int, sets: int, seed: int) -> Near:
    """Of `sets` independent sets of so many populations."""
    path, target, found = ts.Steering(toy.model, None, proposal), toy.exact.target, []
    for k in range(sets):
        result = ts.smc(path, particles, populations, generator=seeded(1000 * seed + k + 1))
        log_z, error = result.pooled_log_z
        found.append((tv(toy.law(result), target), float(result.ess[-1].mean()) / particles, log_z, error))
    far, ess, log_z, error = torch.tensor(found, dtype=torch.float64).T
    count = particles * populations
    iid = torch.multinomial(target.expand(sets, -1), count, True, generator=seeded(seed))
    drawn = [tv(torch.bincount(row, minlength=len(target)) / count, target) for row in iid]
    floor, gap = tv_floor(target, count), float(log_z.mean()) - toy.exact.log_z
    return Near(
        float(far.mean()),
        floor,
        float(far.max()) / floor,
        max(drawn) / floor,
        float(ess.mean()),
        gap / (float(error.mean()) / sets**0.5),
    )


def first_opening(p1: Tensor, p2: Tensor) -> float:
    """ESS/N of p1 · p2 of two sites without resampling, for infinitely many particles and steps. One site opens first,
    with its token from the product of what is known of it, and its weight is the mass that this leaves for the other:
    c(v) = Σ_u p1(u | v) p2(u | v)."""
    squares = []
    for one, other in ((p1, p2), (p1.T, p2.T)):
        first = one.sum(1) * other.sum(1)
        mass = (one * other).sum(1) / first
        squares.append((first * mass.square()).sum() * first.sum())
    return float((p1 * p2).sum().square() / torch.stack(squares).mean())
