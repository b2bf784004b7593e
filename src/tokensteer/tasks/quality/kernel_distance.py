"""KID: the squared maximum mean discrepancy of features under (x·y/D + 1)³ (Bińkowski et al., 2018).

It is unbiased at any number of images, unlike FID, and may be negative.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tokensteer.tasks.common.metrics import Measured, measured


def kid(features: Tensor, reference: Tensor, *, block: int = 1000, generator: Generator | None = None) -> Measured:
    """The mean and standard error over disjoint random blocks of `block` rows of both, features (P, D) and (Q, D).

    Blocks share no row, so they are independent and the error is a true one. Rows beyond the last whole block are
    unused; with fewer than `block` rows there is one smaller block and no error.
    """
    if features.dim() != 2 or reference.dim() != 2 or features.shape[1] != reference.shape[1]:
        raise ValueError(
            f"features must be (P, D) and (Q, D), got {tuple(features.shape)} and {tuple(reference.shape)}: measure "
            "both with the same network"
        )
    least = min(len(features), len(reference))
    size = min(block, least)
    if size < 2:
        raise ValueError("KID compares pairs: give two images or more on either side, and a block of two or more")
    count = least // size
    here, there = (torch.split(_shuffled(rows, generator)[: count * size], size) for rows in (features, reference))
    return measured(torch.stack([squared_mmd(x, y) for x, y in zip(here, there, strict=True)]))


def squared_mmd(x: Tensor, y: Tensor) -> Tensor:
    """The unbiased estimate from rows (P, D) and (Q, D), in float64: pairs of a row with itself do not count."""
    x, y = x.double(), y.double().to(x.device)
    return _mean_of_pairs(x) + _mean_of_pairs(y) - 2 * _kernel(x, y).mean()


def _mean_of_pairs(x: Tensor) -> Tensor:
    table = _kernel(x, x)
    return (table.sum() - table.diagonal().sum()) / (len(x) * (len(x) - 1))


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.mT / x.shape[1] + 1.0) ** 3


def _shuffled(rows: Tensor, generator: Generator | None) -> Tensor:
    device = None if generator is None else generator.device
    return rows[torch.randperm(len(rows), generator=generator, device=device).to(rows.device)]
