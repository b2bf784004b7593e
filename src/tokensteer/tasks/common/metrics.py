"""What is measured of models and samples, each with its standard error."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from tokensteer.core.models.diffusion import Denoiser
from tokensteer.train import masked_bound

Classifier = Callable[[Tensor], Tensor]
"""Log-probabilities of classes, (P, K), of ids (P, L)."""


@dataclass(frozen=True)
class Measured:
    """A mean and its standard error, NaN if a single value gave it."""

    mean: float
    error: float

    def numbers(self) -> dict[str, float | None]:
        """For JSON, which knows no NaN."""
        return {name: v if math.isfinite(v) else None for name, v in (("mean", self.mean), ("error", self.error))}

    def __str__(self) -> str:
        return f"{self.mean:.4g} ± {self.error:.2g}"


def measured(values: Tensor) -> Measured:
    """The mean of independent values."""
    values = values.double().flatten()
    return Measured(float(values.mean()), float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.nan)


def in_parts(function: Callable[[Tensor], Tensor], x: Tensor, rows: int = 1000) -> Tensor:
    """function(x) without gradients, `rows` at a time."""
    with torch.no_grad():
        return torch.cat([function(x[start : start + rows]) for start in range(0, len(x), rows)])


def masked_bounds(
    denoiser: Denoiser, ids: Tensor, mask_id: int, *, draws: int = 8, generator: Generator, rows: int = 500
) -> Tensor:
    """For each of ids (P, L) an estimate of the bound on -log p(x) in nats, (P,), for a masked model that ignores time.

    Each sequence is seen `draws` times, with its own even spread of how much is masked.
    """

    def bound(x0: Tensor) -> Tensor:
        jitter = torch.rand(len(x0), draws, generator=generator, device=x0.device)
        u = ((torch.arange(draws, device=x0.device) + jitter) / draws).flatten()
        many = x0.long().repeat_interleave(draws, 0)
        nats = masked_bound(lambda x, t: denoiser(x, 0.5), many, mask_id, generator, u)
        return nats.view(-1, draws).mean(-1)

    return in_parts(bound, ids, rows)


def nll_bound(
    denoiser: Denoiser, ids: Tensor, mask_id: int, *, draws: int = 8, generator: Generator, rows: int = 500
) -> Measured:
    """The bound on -log2 p(x) per site: the mean of `masked_bounds`, with the error over sequences."""
    nats = masked_bounds(denoiser, ids, mask_id, draws=draws, generator=generator, rows=rows)
    return measured(nats / (math.log(2) * ids.shape[1]))


def accuracy(classifier: Classifier, ids: Tensor, labels: Tensor) -> Measured:
    """The share of ids (P, L) whose likeliest class is their label (P,)."""
    return measured((in_parts(classifier, ids).argmax(-1) == labels.to(ids.device)).double())


def label_histogram(classifier: Classifier, ids: Tensor) -> Tensor:
    """The share of each class among ids (P, L), (K,)."""
    log_p = in_parts(classifier, ids)
    return torch.bincount(log_p.argmax(-1), minlength=log_p.shape[-1]).cpu().double() / len(ids)


def hamming(ids: Tensor) -> Tensor:
    """The share of sites at which each of ids (P, L) differs from each of the others, on average, (P,)."""
    if len(ids) < 2:
        return torch.full((len(ids),), math.nan)
    agree = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
    for token in range(int(ids.max()) + 1):  # counts of each token at each site spare us a (P, P, L) table
        here = (ids == token).double()
        agree += here @ here.sum(0)
    return 1.0 - (agree - ids.shape[1]) / ((len(ids) - 1) * ids.shape[1])
