"""Means and covariances of features, in parts that can be merged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokensteer import tensorfile

KIND = "moments of features"


@dataclass(frozen=True)
class Moments:
    """The number of rows, their mean (D,), and the sum of outer products of their deviations from it, (D, D), in
    float64."""

    count: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, features: Tensor) -> Moments:
        """Of features (P, D), on their device."""
        if features.dim() != 2 or not len(features):
            raise ValueError(f"features must be (P, D) with P >= 1, got {tuple(features.shape)}")
        features = features.double()
        mean = features.mean(0)
        deviation = features - mean
        return cls(len(features), mean, deviation.mT @ deviation)

    @classmethod
    def of_parts(cls, parts: Iterable[Tensor]) -> Moments:
        """Of features that come in parts (P, D), none of which is kept."""
        whole: Moments | None = None
        for part in parts:
            whole = cls.of(part) if whole is None else whole + cls.of(part)
        if whole is None:
            raise ValueError("there are no features: give at least one part")
        return whole

    def __add__(self, other: Moments) -> Moments:
        """The moments of both sets together (Chan, Golub and LeVeque, 1979)."""
        count, step = self.count + other.count, other.mean - self.mean
        return Moments(
            count,
            self.mean + step * (other.count / count),
            self.scatter + other.scatter + torch.outer(step, step) * (self.count * other.count / count),
        )

    @property
    def covariance(self) -> Tensor:
        """The unbiased covariance (D, D)."""
        if self.count < 2:
            raise ValueError("one image has no covariance: measure two at least")
        return self.scatter / (self.count - 1)

    def to(self, device: torch.device | str) -> Moments:
        return Moments(self.count, self.mean.to(device), self.scatter.to(device))

    def save(self, file: Path, source: str, **card: Any) -> None:
        """Write the moments, half of the symmetric table, and a card: what was measured, and anything else of JSON."""
        size = len(self.mean)
        upper = self.scatter[*torch.triu_indices(size, size, device=self.scatter.device)]
        header = {**card, "kind": KIND, "count": self.count, "source": source}
        tensorfile.write(file, {"mean": self.mean, "upper": upper}, header)

    @classmethod
    def load(cls, file: Path) -> tuple[Moments, dict[str, Any]]:
        """The moments of a file, on the CPU, and its card."""
        tensors, card = tensorfile.read(file)
        mean, upper, count = tensors.get("mean"), tensors.get("upper"), card.get("count")
        fits = mean is not None and upper is not None and upper.numel() == mean.numel() * (mean.numel() + 1) // 2
        if card.get("kind") != KIND or mean is None or upper is None or not fits or not isinstance(count, int):
            raise ValueError(f"{file} holds no moments of features: write them with Moments.save")
        size = len(mean)
        row, column = torch.triu_indices(size, size)
        scatter = torch.empty(size, size, dtype=torch.float64)
        scatter[row, column] = scatter[column, row] = upper
        return cls(count, mean, scatter), card
