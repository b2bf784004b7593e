"""Precision and recall of generated images by nearest neighbours of features (Kynkäänniemi et al., 2019).

The support of a set of images is the union of balls around their features, each up to the k-th nearest neighbour of its
centre. Precision is the share of generated images in the support of the real ones, recall the share of real images in
the support of the generated ones. Both depend on the number of images: compare at equal numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from tokensteer.tasks.common.metrics import Measured, measured

MOST = 10_000  # images of either set, as in the paper's tables of small sets; the cost is quadratic
ROWS = 1000  # of a table of distances at a time


@dataclass(frozen=True)
class Coverage:
    """Precision and recall, and the numbers of images, generated and real, that they depend on."""

    precision: Measured
    recall: Measured
    count: int
    reference_count: int


def precision_recall(
    features: Tensor,
    reference: Tensor,
    *,
    neighbours: int = 3,
    most: int = MOST,
    generator: Generator | None = None,
) -> Coverage:
    """Of features (P, D) of generated images against (Q, D) of real ones, at `most` random rows of each."""
    features, reference = (_subset(rows, most, generator) for rows in (features, reference))
    if not 1 <= neighbours < min(len(features), len(reference)):
        raise ValueError(
            f"neighbours must be 1 or more and fewer than the images, got {neighbours} for {len(features)} generated "
            f"and {len(reference)} real ones"
        )
    reference = reference.to(features.device)
    precision = measured(in_support(features, reference, neighbours).double())
    recall = measured(in_support(reference, features, neighbours).double())
    return Coverage(precision, recall, len(features), len(reference))


def in_support(points: Tensor, centres: Tensor, neighbours: int) -> Tensor:
    """Which of the points (P, D) lie in a ball around one of the centres (Q, D), (P,)."""
    radii = _radii(centres, neighbours)
    return torch.cat([(_squared_distances(part, centres) <= radii).any(-1) for part in torch.split(points, ROWS)])


def _radii(centres: Tensor, neighbours: int) -> Tensor:
    """The squared distance of each centre to its k-th nearest neighbour, (Q,)."""
    found: list[Tensor] = []
    for start in range(0, len(centres), ROWS):
        table = _squared_distances(centres[start : start + ROWS], centres)
        own = torch.arange(len(table), device=table.device)
        table[own, start + own] = math.inf  # nothing is its own neighbour
        found.append(table.kthvalue(neighbours, -1).values)
    return torch.cat(found)


def _squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """(P, Q) in float64, so that the difference of large squares is exact enough."""
    x, y = x.double(), y.double()
    return (x.square().sum(-1, keepdim=True) + y.square().sum(-1) - 2 * x @ y.mT).clamp(min=0)


def _subset(rows: Tensor, most: int, generator: Generator | None) -> Tensor:
    if len(rows) <= most:
        return rows
    device = None if generator is None else generator.device
    return rows[torch.randperm(len(rows), generator=generator, device=device)[:most].to(rows.device)]
