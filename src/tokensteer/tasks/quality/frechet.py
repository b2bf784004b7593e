"""The Fréchet distance of two Gaussians, which of Inception features is FID (Heusel et al., 2017).

|m - m'|² + tr S + tr S' - 2 tr (R S' R)^½, with R the square root of S. R S' R is symmetric, so its eigenvalues are all
that is needed. FID falls with the number of images, about as 1/n, even if all are from the same distribution: compare
it at equal numbers only, or use `extrapolate` (Chong and Forsyth, 2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from tokensteer.tasks.quality.moments import Moments

linalg = cast("Any", torch.linalg)  # has no types


@dataclass(frozen=True)
class FID:
    """A distance and the numbers of images, of the sample and of the reference, that it depends on."""

    value: float
    count: int
    reference_count: int

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.count:,} images against {self.reference_count:,})"


class Frechet:
    """Distances to one reference, on the reference's device. Its covariance is decomposed once."""

    def __init__(self, reference: Moments) -> None:
        self.reference = reference
        values, vectors = cast("tuple[Tensor, Tensor]", linalg.eigh(reference.covariance))
        # Directions of rounding errors alone are left out: with fewer images than features most are.
        kept = values > values[-1] * len(values) * torch.finfo(values.dtype).eps
        self.root = vectors[:, kept] * values[kept].sqrt()  # S = root · rootᵀ
        self.trace = reference.covariance.trace()

    def __call__(self, moments: Moments) -> FID:
        here = self.reference
        if moments.mean.shape != here.mean.shape:
            raise ValueError(
                f"the sample has {len(moments.mean)} features and the reference {len(here.mean)}: measure both with "
                "the same network"
            )
        moments = moments.to(here.mean.device)
        covariance = moments.covariance
        # Its eigenvalues that are not 0 are those of R S' R.
        squares = cast("Tensor", linalg.eigvalsh(self.root.mT @ covariance @ self.root))
        overlap = squares.clamp(min=0).sqrt().sum()
        gap = (moments.mean - here.mean).square().sum()
        return FID(float(gap + self.trace + covariance.trace() - 2 * overlap), moments.count, here.count)

    def of(self, features: Tensor) -> float:
        """The distance of features (P, D)."""
        return self(Moments.of(features.to(self.reference.mean.device))).value


def fid(moments: Moments, reference: Moments) -> FID:
    """The distance of a sample from a reference."""
    return Frechet(reference)(moments)
