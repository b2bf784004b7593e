"""Metrics whose bias falls as 1/n, extrapolated to infinitely many images (Chong and Forsyth, 2020).

FID and the Inception score of n images are a + b/n for large n, with a slope b that depends on the generator: two
generators may change places as n grows. The intercept a has no such bias. It has a larger variance, and the reference
stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from tokensteer.tasks.common.metrics import Measured


@dataclass(frozen=True)
class Line:
    """The metric at several numbers of images, and the least-squares line in 1/n through it. The error of the intercept
    is that of the fit; subsets overlap, so it is a lower bound."""

    counts: tuple[int, ...]
    values: tuple[float, ...]
    intercept: Measured
    slope: float


def extrapolate(
    metric: Callable[[Tensor], float],
    features: Tensor,
    *,
    least: int = 5000,
    points: int = 15,
    generator: Generator | None = None,
) -> Line:
    """Measure random subsets of features (P, D), `least` to P of them at `points` even numbers, and fit a line."""
    most = len(features)
    if points < 3 or not 2 <= least < most:
        raise ValueError(
            f"a line needs three points or more between least and the number of images, got {points} points between "
            f"{least} and {most}: lower least, or give more images"
        )
    counts = [round(least + (most - least) * k / (points - 1)) for k in range(points)]
    device = None if generator is None else generator.device
    values = [
        metric(features[torch.randperm(most, generator=generator, device=device)[:count].to(features.device)])
        for count in counts
    ]
    return fit_line(counts, values)


def fit_line(counts: list[int], values: list[float]) -> Line:
    """The least-squares line of values over 1/count."""
    x, y = 1.0 / torch.tensor(counts, dtype=torch.float64), torch.tensor(values, dtype=torch.float64)
    centred = x - x.mean()
    spread = centred.square().sum()
    slope = (centred * y).sum() / spread
    intercept = y.mean() - slope * x.mean()
    noise = (y - intercept - slope * x).square().sum() / (len(x) - 2)
    error = (noise * (1.0 / len(x) + x.mean().square() / spread)).sqrt()
    return Line(tuple(counts), tuple(values), Measured(float(intercept), float(error)), float(slope))
