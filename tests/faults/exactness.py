"""log Z against enumeration, as z-scores over many populations.

exp(log_z) of a population is unbiased for Z, so the mean over populations has a z-score with mean 0 and variance 1. A
run whose |z| is above `SUSPECT` is looked at again with more populations and other seeds, and is wrong if |z| is above
`IMPOSSIBLE` at the last look: for normal scores that happens to one right configuration in 10^12. Weights have heavier
tails than normal ones. A gradient from one draw can leave a token so little probability that rare populations have most
of the mean, which looks too low until one of them is seen; hence the last look. The mean of z² shows an error too small
for any single score.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

import tokensteer as ts
from tests.faults.choices import Choices
from tests.faults.runs import Plan
from tests.faults.steerings import Aim
from tokensteer.testing import enumerate_steering

LOOKS = ((1, 200), (1, 6000), (20, 6000))  # runs, and populations in each
PARTICLES = 4  # at most: the fewer, the more every weight matters
SUSPECT, IMPOSSIBLE = 3.5, 6.0
SPREAD = 3.0  # at most the variance of z² allowed for; 2 for normal scores
LEAST = -700.0  # exp of less is 0: no token of that probability is ever drawn
ROUNDING = {torch.float64: 1e-7, torch.float32: 1e-4}  # of the mean of exp(log_z), relative to Z


@lru_cache(maxsize=8)
def exact_log_z(aim: Aim, row: int) -> float | None:
    """log Z of one population; None if its model cannot be enumerated. Runs of one steering share it."""
    try:
        return enumerate_steering(aim.of_population(row)).log_z
    except ValueError as error:
        if "the kernel has a memory" in str(error):
            return None
        raise


def ratios(plan: Plan, row: int, exact: float, populations: int, seed: int) -> Tensor:
    """Z_hat / Z of each of so many populations of one template."""
    templates = plan.aim.steering.model.populations
    particles = plan.options["num_particles"]
    particles = particles if particles <= PARTICLES else PARTICLES - particles % 2  # groups of two stay whole
    result = plan.run(seed, num_particles=particles, populations=templates * populations, keep_states=False)
    return (result.log_z.view(templates, populations)[row] - exact).exp()


@dataclass
class Scores:
    """The z-scores of a run, and the configurations that are wrong."""

    z: list[float] = field(default_factory=list[float])
    wrong: list[str] = field(default_factory=list[str])

    def judge(self, choices: Choices, plan: Plan, row: int, seed: int) -> None:
        """Compare a run with enumeration, at one of its templates."""
        canvas, model = plan.aim.made.canvas, plan.aim.steering.model
        if plan.options["resample"] is ts.resampling.heaviest:  # by design it has no known target
            return
        if not (canvas[row] == model.kernel.mask_id).any():  # a template without a free site is no model alone
            return
        ahead = model.looks_ahead or plan.aim.rule is not None
        if ahead and not plan.aim.made.full:  # a look-ahead of no mass is a floor as well, and weights are heavy-tailed
            return
        exact = exact_log_z(plan.aim, row)
        if exact is None:
            return
        if exact < LEAST:
            log_z = plan.run(seed, keep_states=False).log_z.view(model.populations, -1)[row]
            if (log_z > LEAST).any():
                self._add(choices, f"log Z is {exact:.6g}, and weights are larger")
            return
        ratio = ratios(plan, row, exact, LOOKS[0][1], seed)
        rounding = ROUNDING[model.dtype]
        if float(ratio.std()) < rounding:  # all weights are equal: no score, but the number itself
            if abs(float(ratio.mean()) - 1.0) > rounding:
                self._add(choices, f"log Z is {exact:.6g} and every estimate is off by {float(ratio.mean()) - 1:.2g}")
            return
        z = z_score(ratio)
        for runs, populations in LOOKS[1:]:
            if abs(z) > SUSPECT:
                seed += 1000
                z = z_score(torch.cat([ratios(plan, row, exact, populations, seed + k) for k in range(runs)]))
        self.z.append(z)
        if not abs(z) < IMPOSSIBLE:
            self._add(choices, f"log Z is off by {z:.1f} standard errors")

    def _add(self, choices: Choices, what: str) -> None:
        again = f"python -m tests.faults.fuzz --seed {choices.seed} --only {choices.index}"
        self.wrong.append(f"{what}\n  {choices}\n  {again}")

    @property
    def mean_square(self) -> float:
        return sum(z * z for z in self.z) / max(1, len(self.z))

    @property
    def bound(self) -> float:
        """How far the mean of z² may be from 1: six standard errors."""
        return IMPOSSIBLE * math.sqrt(SPREAD / max(1, len(self.z)))

    def findings(self) -> list[str]:
        far = len(self.z) >= 30 and not abs(self.mean_square - 1.0) <= self.bound
        return self.wrong + [f"the mean of z² is {self.mean_square:.3f}, not within {self.bound:.3f} of 1"] * far

    def __str__(self) -> str:
        worst = max((abs(z) for z in self.z), default=0.0)
        return f"{len(self.z)} scores, mean z² {self.mean_square:.3f} (1 ± {self.bound:.3f}), largest {worst:.2f}"


def z_score(ratio: Tensor) -> float:
    return (float(ratio.mean()) - 1.0) / (float(ratio.std()) / math.sqrt(len(ratio)))
