"""Metrics of models and samples, each with its standard error."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from tokensteer.core.models.diffusion import Denoiser
from tokensteer.core.particles.result import Result
from tokensteer.train import masked_bound

Classifier = Callable[[Tensor], Tensor]
"""Log-probabilities of classes, (P, K), of ids (P, L)."""


@dataclass(frozen=True)
class Measured:
    """A mean and its standard error, NaN for the mean of a single value. `count` is the number of independent values
    that it is the mean of, if known."""

    mean: float
    error: float
    count: int | None = field(default=None, compare=False)

    def numbers(self) -> dict[str, float | None]:
        """For JSON, with None in place of NaN."""
        return {name: v if math.isfinite(v) else None for name, v in (("mean", self.mean), ("error", self.error))}

    def times(self, factor: float) -> Measured:
        return Measured(self.mean * factor, self.error * factor, self.count)

    def __str__(self) -> str:
        return f"{self.mean:.4g} ± {self.error:.2g}"


def measured(values: Tensor) -> Measured:
    """The mean of independent values."""
    values = values.double().flatten()
    count = len(values)
    return Measured(float(values.mean()), float(values.std() / math.sqrt(count)) if count > 1 else math.nan, count)


def weighted(result: Result, values: Tensor) -> Measured:
    """The mean over populations of the weighted mean of values, one for each sample in order, of any shape."""
    weights = result.weights.double()
    return measured((weights * values.view_as(weights)).sum(-1))


def diversity(images: Tensor, groups: int) -> dict[str, Measured]:
    """The mean difference of each image (P, 3, H, W) of bytes from the next one of its group, as a share of white.
    Groups, such as classes, have equally many images, one behind the other; nothing if each has only one."""
    if len(images) <= groups:
        return {}
    numbers = images.view(groups, -1, *images.shape[1:]).float() / 255
    return {"diversity": measured((numbers - numbers.roll(1, 1)).abs().mean((2, 3, 4)))}


def ess_share(result: Result) -> Measured:
    """The final effective sample size over the number of particles."""
    return measured(result.ess[-1] / result.weights.shape[1])


def in_parts(function: Callable[[Tensor], Tensor], x: Tensor, rows: int = 1000) -> Tensor:
    """function(x) without gradients, `rows` at a time."""
    with torch.no_grad():
        return torch.cat([function(x[start : start + rows]) for start in range(0, len(x), rows)])


def masked_bounds(
    denoiser: Denoiser, ids: Tensor, mask_id: int, *, draws: int = 8, generator: Generator, rows: int = 500
) -> Tensor:
    """Estimates of the bound on -log p(x) in nats, (P,), of ids (P, L), for a masked model that ignores time."""

    def bound(x0: Tensor, u: Tensor) -> Tensor:
        return masked_bound(lambda x, t: denoiser(x, 0.5), x0, mask_id, generator, u)

    return stratified_bounds(bound, ids, draws=draws, generator=generator, rows=rows)


def stratified_bounds(
    bound: Callable[[Tensor, Tensor], Tensor], ids: Tensor, *, draws: int, generator: Generator, rows: int
) -> Tensor:
    """The mean over `draws` of bound(x0, u), (P,), for each of ids (P, L); its u in [0, 1] are spread evenly."""

    def mean(x0: Tensor) -> Tensor:
        jitter = torch.rand(len(x0), draws, generator=generator, device=x0.device)
        u = ((torch.arange(draws, device=x0.device) + jitter) / draws).flatten()
        return bound(x0.long().repeat_interleave(draws, 0), u).view(-1, draws).mean(-1)

    return in_parts(mean, ids, rows)


def nll_bound(
    denoiser: Denoiser, ids: Tensor, mask_id: int, *, draws: int = 8, generator: Generator, rows: int = 500
) -> Measured:
    """The bound on -log2 p(x) per site: the mean of `masked_bounds` over sequences."""
    nats = masked_bounds(denoiser, ids, mask_id, draws=draws, generator=generator, rows=rows)
    return measured(nats / (math.log(2) * ids.shape[1]))


def accuracy(classifier: Classifier, ids: Tensor, labels: Tensor) -> Measured:
    """The share of ids (P, L) whose most likely class is their label (P,)."""
    return measured((in_parts(classifier, ids).argmax(-1) == labels.to(ids.device)).double())


def label_histogram(classifier: Classifier, ids: Tensor) -> Tensor:
    """The share of each class among ids (P, L), (K,)."""
    log_p = in_parts(classifier, ids)
    return torch.bincount(log_p.argmax(-1), minlength=log_p.shape[-1]).cpu().double() / len(ids)


def hamming(ids: Tensor) -> Tensor:
    """The mean share of sites at which each of ids (P, L) differs from the others, (P,)."""
    if len(ids) < 2:
        return torch.full((len(ids),), math.nan)
    agree = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
    for token in range(int(ids.max()) + 1):  # counts per token and site instead of a (P, P, L) table
        here = (ids == token).double()
        agree += here @ here.sum(0)
    return 1.0 - (agree - ids.shape[1]) / ((len(ids) - 1) * ids.shape[1])


def tv(p: Tensor, q: Tensor) -> float:
    """The total variation distance of two pmfs of the same shape."""
    return float((p - q).abs().sum() / 2)


def tv_floor(pmf: Tensor, count: float) -> float:
    """The expected TV of `count` exact draws, by de Moivre's mean deviation of a binomial; linear between whole
    numbers."""
    low = max(1, math.floor(count))
    part = min(1.0, max(0.0, count - low))
    return (1.0 - part) * _tv_floor(pmf, low) + part * _tv_floor(pmf, low + 1)


def _tv_floor(pmf: Tensor, count: int) -> float:
    k = (count * pmf).floor()
    n = torch.tensor(float(count), dtype=pmf.dtype)
    log_ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma((n - k).clamp(min=1))  # (k + 1)·C(n, k + 1)
    log_deviation = log_ways + (k + 1) * pmf.log() + (n - k) * torch.log1p(-pmf)
    return float(torch.where(k < n, log_deviation.exp(), 0.0).sum() / n)
