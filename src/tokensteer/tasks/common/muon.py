"""Muon: an optimiser for the matrices of hidden layers (Jordan et al., 2024).

The step of a matrix is its averaged gradient with all singular values moved near 1, so that directions in which
gradients are small are learned as fast as others. It is found without a decomposition, by a polynomial of odd degree
that is applied a few times. Steps are scaled to the size that AdamW's usually have (Liu et al., 2025), which makes one
rate do for both. Matrices of one shape are moved together: a network has few shapes, and each would be a small kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

POLYNOMIAL = (3.4445, -4.7750, 2.0315)
"""p(s) = a·s + b·s³ + c·s⁵ takes small singular values up fast; from there they stay between about 0.7 and 1.2."""
TIMES = 5
MOMENTUM = 0.95
SIZE = 0.2
"""The root mean square of a step at rate 1."""


class Muon:
    """Moves `weights`, matrices by name, by their gradients. `momenta` are what a checkpoint holds."""

    def __init__(self, weights: Mapping[str, Tensor], decay: float = 0.0) -> None:
        self.decay = decay
        self._names: dict[torch.Size, list[str]] = {}
        for name, weight in weights.items():
            self._names.setdefault(weight.shape, []).append(name)
        self._weights = dict(weights)
        self._moving = {shape: _stacked(weights, names).zero_() for shape, names in self._names.items()}

    @property
    def momenta(self) -> dict[str, Tensor]:
        return {n: m for shape, names in self._names.items() for n, m in zip(names, self._moving[shape], strict=True)}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for shape, names in self._names.items():
            weights = [self._weights[name] for name in names]
            slopes = torch.stack([torch.zeros_like(w) if w.grad is None else w.grad for w in weights])
            moving = self._moving[shape].mul_(MOMENTUM).add_(slopes)
            steps = orthogonal(slopes.add_(moving, alpha=MOMENTUM)) * (SIZE * max(shape) ** 0.5)
            for weight, step in zip(weights, steps, strict=True):
                weight.mul_(1 - rate * self.decay).sub_(step, alpha=rate)


def orthogonal(matrices: Tensor) -> Tensor:
    """Matrices (K, M, N) with the same singular vectors, and singular values near 1. On a GPU in bfloat16."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.square().sum((-2, -1), keepdim=True).sqrt().clamp(min=1e-7)  # singular values of at most 1
    a, b, c = POLYNOMIAL
    for _ in range(TIMES):
        square = x @ x.mT
        both = torch.baddbmm(square, square, square, beta=b, alpha=c)  # few kernels: a step is short
        x = torch.baddbmm(x, both, x, beta=a)
    return x.mT if tall else x


def _stacked(weights: Mapping[str, Tensor], names: list[str]) -> Tensor:
    return torch.stack([weights[name].detach() for name in names]).float()
