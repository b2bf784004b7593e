"""log Z against enumeration, as z-scores over many populations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

import tokensteer as ts
from tests.faults.choices import Choices
from tests.faults.runs import Plan
from tokensteer.testing import enumerate_steering

POPULATIONS, MORE = 300, 6000
SUSPECT, IMPOSSIBLE = 3.5, 6.0
KURTOSIS = 6.0


def exact_log_z(plan: Plan, row: int) -> float | None:
    """log Z of one population; None if its model cannot be enumerated."""
    try:
        return enumerate_steering(plan.aim.of_population(row)).log_z
    except ValueError as error:
        if "the kernel has a memory" in str(error):
            return None
        raise


def estimates(plan: Plan, row: int, populations: int, seed: int) -> Tensor:
    """log Z by each of so many populations of one template."""
    templates = plan.aim.steering.model.populations
    particles = min(4, plan.options["num_particles"])
    resample = plan.options["resample"]
    result = plan.run(seed, num_particles=particles, populations=templates * populations, keep_states=False)
    del resample
    return result.log_z.view(templates, populations)[row]


def z_of(log_z: Tensor, exact: float) -> tuple[float, float]:
    """The z-score of the mean of exp(log_z), and its relative standard error."""
    ratio = (log_z - exact).exp()
    error = float(ratio.std()) / math.sqrt(len(ratio))
    return (float(ratio.mean()) - 1.0) / max(error, 1e-7), error


def z_score(plan: Plan, seed: int) -> float | None:
    if plan.options["resample"] is ts.resampling.heaviest:  # it has no known target
        return None
    row = seed % plan.aim.steering.model.populations
    exact = exact_log_z(plan, row)
    if exact is None:
        return None
    log_z = estimates(plan, row, POPULATIONS, seed)
    if exact == -math.inf:
        return None if (log_z == -math.inf).all() else math.inf
    z, error = z_of(log_z, exact)
    if abs(z) > SUSPECT:
        z, error = z_of(estimates(plan, row, MORE, seed + 1), exact)
    return z


@dataclass
class Scores:
    z: list[float] = field(default_factory=list[float])
    wrong: list[str] = field(default_factory=list[str])

    def add(self, choices: Choices, z: float | None) -> None:
        if z is None:
            return
        self.z.append(z)
        if not abs(z) < IMPOSSIBLE:
            self.wrong.append(f"log Z is off by {z:.1f} standard errors: {choices.index} {choices}")

    def findings(self) -> list[str]:
        return self.wrong

    def __str__(self) -> str:
        z = torch.tensor(self.z, dtype=torch.float64)
        return f"{len(z)} judged, mean z² {float(z.square().mean()):.3f}, worst {float(z.abs().max()) if len(z) else 0:.2f}"
