"""Resampling: which particles go on, and with which weights.

A resampler takes the log-weights of B populations of N particles and returns `ancestors` and the new log-weights, both
(B, N). One law binds all but `heaviest`: given the old weights, the expected new weight carried by the children of
particle i is the old weight of i, so the mean weight of a population is never changed and log Z is simply its
logarithm. Plain resampling gives every child that mean; partial resampling shares it among the resampled only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from tokensteer.core.numerics.domains import check_number, check_whole
from tokensteer.core.numerics.draws import inverse_cdf, uniforms

Resampler = Callable[[Tensor, Generator | None], tuple[Tensor, Tensor]]


def log_mean_weight(log_w: Tensor) -> Tensor:
    """log (1/N) sum_i w_i over the last axis; -inf where all are dead."""
    return log_w.logsumexp(-1) - math.log(log_w.shape[-1])


def weights(log_w: Tensor) -> Tensor:
    """Normalised weights; uniform where a population has died, so that it is carried along unchanged in law."""
    return log_w.clamp(min=torch.finfo(log_w.dtype).min).softmax(-1)


def ess(log_w: Tensor) -> Tensor:
    """Effective sample size (sum w)² / sum w², in [1, N]; 0 where a population has died."""
    return log_w.softmax(-1).square().sum(-1).reciprocal().masked_fill(log_w.amax(-1) == -math.inf, 0.0)


def _even(log_w: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor]:
    return ancestors, log_mean_weight(log_w).unsqueeze(-1).expand_as(log_w)


def _points(log_w: Tensor, u: Tensor) -> Tensor:
    """One point in each of N equal cells of (0, 1], at the fraction u of it."""
    n = log_w.shape[-1]
    return (u + torch.arange(n, device=log_w.device)) / n


def multinomial(log_w: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """Every child draws its parent independently."""
    u = uniforms(tuple(log_w.shape), log_w, generator)
    return _even(log_w, inverse_cdf(weights(log_w), u))


def systematic(log_w: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """One uniform for the whole comb: counts are floor or ceil of N·W."""
    u = uniforms((*log_w.shape[:-1], 1), log_w, generator)
    return _even(log_w, inverse_cdf(weights(log_w), _points(log_w, u)))


def stratified(log_w: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """One uniform in every cell of the comb."""
    u = uniforms(tuple(log_w.shape), log_w, generator)
    return _even(log_w, inverse_cdf(weights(log_w), _points(log_w, u)))


def _expand(counts: Tensor) -> Tensor:
    """Offspring counts (B, N) that sum to at most N, as ancestors in order; places left over repeat the last."""
    n = counts.shape[-1]
    places = torch.arange(n, device=counts.device).expand(counts.shape).contiguous()
    return torch.searchsorted(counts.cumsum(-1), places, right=True).clamp_(max=n - 1)


def residual(log_w: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """floor(N·W) children for sure, the rest multinomial on the remainders."""
    n = log_w.shape[-1]
    expected = n * weights(log_w).double()
    sure = expected.floor()
    left = expected - sure
    drawn = inverse_cdf(
        torch.where(left.sum(-1, keepdim=True) > 0, left, 1.0), uniforms(tuple(log_w.shape), log_w, generator)
    )
    place = torch.arange(n, device=log_w.device)
    return _even(log_w, torch.where(place < sure.sum(-1, keepdim=True), _expand(sure.long()), drawn))


def ssp(log_w: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """Srinivasan sampling: counts are floor or ceil of N·W, rounded pair by pair up a binary tree.

    Two fractions p, q meet; one leaves as 0 or 1, the other carries on with what keeps the sum, each with its
    expectation unchanged: (p + q, 0) or (0, p + q) if p + q < 1, else (1, p + q - 1) or (p + q - 1, 1).
    """
    n = log_w.shape[-1]
    expected = n * weights(log_w).double()
    counts = expected.floor()
    fraction = expected - counts
    who = torch.arange(n, device=log_w.device).expand(log_w.shape)
    while fraction.shape[-1] > 1:
        odd = fraction.shape[-1] % 2
        paired = fraction.shape[-1] - odd
        p, q = fraction[..., 0:paired:2], fraction[..., 1:paired:2]
        i, j = who[..., 0:paired:2], who[..., 1:paired:2]
        total = p + q
        low = total < 1
        chance = torch.where(low, p / total.clamp(min=1e-300), (1 - q) / (2 - total).clamp(min=1e-300))
        first = uniforms(tuple(p.shape), log_w, generator) <= chance
        carrier = torch.where(first == low, i, j)
        leaver = torch.where(first == low, j, i)
        counts = counts.scatter_add(-1, leaver, torch.where(low, 0.0, 1.0).to(counts.dtype))
        fraction = torch.cat([torch.where(low, total, total - 1), fraction[..., paired:]], -1)
        who = torch.cat([carrier, who[..., paired:]], -1)
    counts = counts.scatter_add(-1, who, fraction.round())
    return _even(log_w, _expand(counts.long()))


def nested(resampler: Resampler, candidates: int) -> Resampler:
    """Particles in groups of `candidates`: groups are resampled by their mean weight, then each new group descends from
    one member of its parent group drawn by weight. This is SVDD made exact."""
    check_whole("nested: candidates", candidates)

    def resample(log_w: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        if log_w.shape[-1] % candidates:
            raise ValueError(f"{log_w.shape[-1]} particles do not divide into groups of {candidates} candidates")
        grouped = log_w.view(*log_w.shape[:-1], -1, candidates)
        group, _ = resampler(log_mean_weight(grouped), generator)
        parents = grouped.gather(-2, group.unsqueeze(-1).expand_as(grouped))
        member = inverse_cdf(weights(parents), uniforms((*group.shape, 1), log_w, generator))
        return _even(log_w, (group.unsqueeze(-1) * candidates + member).expand_as(grouped).flatten(-2))

    return resample


def one_survivor(log_w: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """Every child descends from a single parent drawn by weight, as in SVDD."""
    survivor = inverse_cdf(weights(log_w), uniforms((*log_w.shape[:-1], 1), log_w, generator))
    return _even(log_w, survivor.expand_as(log_w))


def heaviest(log_w: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """Every child descends from the parent of highest weight, as in the greedy form of SVDD. This breaks the law above:
    what comes of it has no target, and its log Z no meaning."""
    return _even(log_w, log_w.argmax(-1, keepdim=True).expand_as(log_w))


def partial(resampler: Resampler, fraction: float = 0.5) -> Resampler:
    """Resample the lightest and the heaviest particles only, a `fraction` of all; the others keep their weights."""
    check_number("partial: fraction", fraction, "(0, 1]")

    def resample(log_w: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        n = log_w.shape[-1]
        k = max(1, round(fraction * n))
        order = log_w.sort(dim=-1, stable=True).indices
        chosen = torch.cat([order[..., : k // 2], order[..., n - (k - k // 2) :]], -1)
        parents, shared = resampler(log_w.gather(-1, chosen), generator)
        here = torch.arange(n, device=log_w.device).expand(log_w.shape)
        return here.scatter(-1, chosen, chosen.gather(-1, parents)), log_w.scatter(-1, chosen, shared)

    return resample
