"""Held-out paths: how good a proposal is on paths that it was not trained on.

A proposal that misses a part of the target has even weights and a log Z that is too low, so that the effective sample
size alone would choose it. Both are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

import torch
from torch import Generator

from tokensteer.core.particles.resampling import ess
from tokensteer.core.particles.result import pooled
from tokensteer.core.proposals.amortised import Amortised
from tokensteer.core.steering.steering import Steering
from tokensteer.train.optim import half_precision
from tokensteer.train.paths import walk

SEED = 1_000_003
GROUP = 16  # the ESS of few particles, as they are used; that of all paths together hangs on the largest weight
SCALES = (1.0, 0.85, 0.7, 0.55, 0.4, 0.25)


@dataclass(frozen=True)
class HeldOut:
    """The mean ESS/N of groups of 16 paths, the mean over populations of log Z, its standard error, and the rows of
    denoiser and proposal."""

    ess: float
    log_z: float
    error: float
    rows: int = 0

    def beats(self, other: HeldOut) -> bool:
        """Whether the ESS is higher and log Z not clearly lower, or log Z is clearly higher: by three standard errors
        and a tenth, which is a tenth of the target."""
        margin = 0.1 + 3.0 * math.hypot(self.error, other.error)
        return self.log_z > other.log_z + margin or (self.ess > other.ess and self.log_z > other.log_z - margin)


@torch.no_grad()
def held_out(steering: Steering, paths: int, generator: Generator) -> HeldOut:
    """`steering`'s proposal on about so many paths, always from the same seed."""
    each = GROUP * max(1, round(paths / GROUP / steering.model.populations))
    before, seeded = proposal_rows(steering), Generator(generator.device).manual_seed(SEED)
    with half_precision(steering.model.device):
        log_w = walk(steering, each * steering.model.populations, seeded, twists=False).log_w.double()
    share = float(ess(log_w.view(-1, GROUP)).mean()) / GROUP
    found = [pooled(own) for own in log_w.view(steering.model.populations, -1)]  # each has a normaliser of its own
    log_z, error = mean(value for value, _ in found), math.hypot(*(one for _, one in found)) / len(found)
    return HeldOut(share, log_z, error, proposal_rows(steering) - before)


def choose_scale(
    steering: Steering, proposal: Amortised, paths: int, generator: Generator, scales: Sequence[float] = SCALES
) -> tuple[float, dict[float, HeldOut]]:
    """The best scale of a learned proposal by held-out paths, and what was found for each."""
    found = {
        scale: held_out(replace(steering, proposal=replace(proposal, scale=scale)), paths, generator)
        for scale in scales
    }
    best = scales[0]
    for scale in scales[1:]:
        best = scale if found[scale].beats(found[best]) else best
    return best, found


def proposal_rows(steering: Steering) -> int:
    """The rows that denoiser and proposal have been asked about."""
    spent = steering.resources.spent()
    return sum(spent[name][0] for name in ("denoiser", "proposal") if name in spent)
