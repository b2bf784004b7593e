"""Resampling schemes. The sources named below are in docs/references.md.

A resampler takes log-weights (B, N) of B populations and returns `ancestors` and new log-weights, both (B, N). All but
`heaviest` keep the mean weight of a population, whose log is log Z: given the old weights, the expected total weight of
the children of particle i is the old weight of i.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from tokensteer.core.numerics.domains import check_callable, check_number, check_whole
from tokensteer.core.numerics.draws import inverse_cdf, uniforms

Resampler = Callable[[Tensor, Generator | None], tuple[Tensor, Tensor]]
"""Log-weights (B, N) -> ancestors and new log-weights, (B, N) each; the mean weight of a population is kept."""


def log_mean_weight(log_w: Tensor) -> Tensor:
    """log (1/N) sum_i w_i over the last axis; -inf where all are dead."""
    return log_w.logsumexp(-1) - math.log(log_w.shape[-1])


def weights(log_w: Tensor) -> Tensor:
    """Normalised weights; uniform where a population has died."""
    return log_w.clamp(min=torch.finfo(log_w.dtype).min).softmax(-1)


def ess(log_w: Tensor) -> Tensor:
    """Effective sample size (sum w)² / sum w², in [1, N] (Kong et al., 1994); 0 where a population has died."""
    return log_w.softmax(-1).square().sum(-1).reciprocal().masked_fill(log_w.amax(-1) == -math.inf, 0.0)


def _even(log_w: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor]:
    """The ancestors, and the mean weight for every child."""
    return ancestors, log_mean_weight(log_w).unsqueeze(-1).expand_as(log_w)


def _points(log_w: Tensor, u: Tensor) -> Tensor:
    """One point in each of N equal cells of (0, 1], at the fraction u of the cell."""
    n = log_w.shape[-1]
    return (u + torch.arange(n, device=log_w.device)) / n


def multinomial(log_w: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """Each child draws its parent independently (Gordon et al., 1993)."""
    u = uniforms(tuple(log_w.shape), log_w, generator)
    return _even(log_w, inverse_cdf(weights(log_w), u))


def systematic(log_w: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """One uniform for all cells: counts are floor or ceil of N·W (Carpenter et al., 1999)."""
    u = uniforms((*log_w.shape[:-1], 1), log_w, generator)
    return _even(log_w, inverse_cdf(weights(log_w), _points(log_w, u)))


def stratified(log_w: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """One uniform for each cell (Kitagawa, 1996)."""
    u = uniforms(tuple(log_w.shape), log_w, generator)
    return _even(log_w, inverse_cdf(weights(log_w), _points(log_w, u)))


def _expand(counts: Tensor) -> Tensor:
    """Ancestors in order from offspring counts (B, N) that sum to at most N; places left over repeat the last."""
    n = counts.shape[-1]
    places = torch.arange(n, device=counts.device).expand(counts.shape).contiguous()
    return torch.searchsorted(counts.cumsum(-1), places, right=True).clamp_(max=n - 1)


def _whole_and_rest(log_w: Tensor) -> tuple[Tensor, Tensor]:
    """floor(N·W) and N·W - floor(N·W), (B, N)."""
    expected = log_w.shape[-1] * weights(log_w).double()
    return expected.floor(), expected - expected.floor()


def residual(log_w: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """floor(N·W) children for sure, the rest multinomial on the remainders (Liu and Chen, 1998)."""
    sure, left = _whole_and_rest(log_w)
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, 1.0)
    drawn = inverse_cdf(left, uniforms(tuple(log_w.shape), log_w, generator))
    place = torch.arange(log_w.shape[-1], device=log_w.device)
    return _even(log_w, torch.where(place < sure.sum(-1, keepdim=True), _expand(sure.long()), drawn))


def ssp(log_w: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """Srinivasan sampling (Gerber et al., 2019): counts are floor or ceil of N·W, rounded in pairs up a binary tree.

    A pair of fractions p, q becomes (p + q, 0) or (0, p + q) if p + q < 1, else (1, p + q - 1) or (p + q - 1, 1), with
    expectations unchanged. The one that is 0 or 1 is done; the other goes on to the next level.
    """
    counts, fraction = _whole_and_rest(log_w)
    who = torch.arange(log_w.shape[-1], device=log_w.device).expand(log_w.shape)
    while fraction.shape[-1] > 1:
        odd = fraction.shape[-1] % 2
        paired = fraction.shape[-1] - odd
        p, q = fraction[..., 0:paired:2], fraction[..., 1:paired:2]
        i, j = who[..., 0:paired:2], who[..., 1:paired:2]
        total = p + q
        low = total < 1
        probability = torch.where(low, p / total.clamp(min=1e-300), (1 - q) / (2 - total).clamp(min=1e-300))
        first = uniforms(tuple(p.shape), log_w, generator) <= probability
        going_on = torch.where(first == low, i, j)
        done = torch.where(first == low, j, i)
        counts = counts.scatter_add(-1, done, torch.where(low, 0.0, 1.0).to(counts.dtype))
        fraction = torch.cat([torch.where(low, total, total - 1), fraction[..., paired:]], -1)
        who = torch.cat([going_on, who[..., paired:]], -1)
    counts = counts.scatter_add(-1, who, fraction.round())
    return _even(log_w, _expand(counts.long()))


def nested(resampler: Resampler, candidates: int) -> Resampler:
    """Groups of `candidates` particles are resampled by mean weight; each new group descends from one member of its
    parent group, drawn by weight. As the island model (Vergé et al., 2015), with SVDD within each island."""
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


def islands(count: int, resampler: Resampler = systematic, fraction: float = 0.5) -> Resampler:
    """The N particles of a population as `count` islands of N / count (Vergé et al., 2015).

    If the ESS of the islands' mean weights is below `fraction`·count, islands are resampled whole, by mean weight. Then
    every island whose own ESS is below `fraction`·N / count resamples its particles. Islands decide for themselves, so
    run them with `when=triggers.always`. The population's mean weight is that of its islands.
    """
    check_whole("islands: count", count)
    check_callable("islands: resampler", resampler, "log-weights and a generator: resampling.systematic is one")
    check_number("islands: fraction", fraction, "(0, 1]")

    def resample(log_w: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        n = log_w.shape[-1]
        if n % count:
            raise ValueError(f"{n} particles do not divide into {count} islands: take a multiple of {count}")
        grouped, size = log_w.view(-1, count, n // count), n // count
        log_z = log_mean_weight(grouped)
        parents, shared = resampler(log_z, generator)
        exchanged = (ess(log_z) < fraction * count).unsqueeze(-1)
        parents = torch.where(exchanged, parents, torch.arange(count, device=log_w.device))
        change = torch.where(exchanged, shared - log_z.gather(-1, parents), 0.0).unsqueeze(-1)
        moved = grouped.gather(-2, parents.unsqueeze(-1).expand_as(grouped))
        moved = torch.where(moved == -math.inf, moved, moved + change).flatten(0, 1)
        members, even = resampler(moved, generator)
        poor = (ess(moved) < fraction * size).unsqueeze(-1)
        members = torch.where(poor, members, torch.arange(size, device=log_w.device))
        ancestors = parents.unsqueeze(-1) * size + members.view_as(grouped)
        return ancestors.view_as(log_w), torch.where(poor, even, moved).view_as(log_w)

    return resample


def one_survivor(log_w: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """Every child descends from one parent, drawn by weight, as in SVDD."""
    survivor = inverse_cdf(weights(log_w), uniforms((*log_w.shape[:-1], 1), log_w, generator))
    return _even(log_w, survivor.expand_as(log_w))


def heaviest(log_w: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """Every child descends from the parent of highest weight, as in greedy SVDD. The mean weight is not kept: the
    samples have no known target and log Z has no meaning."""
    return _even(log_w, log_w.argmax(-1, keepdim=True).expand_as(log_w))


def partial(resampler: Resampler, fraction: float = 0.5) -> Resampler:
    """Resample only the lightest and heaviest particles, a `fraction` of all, among which their mean weight is shared;
    the others keep their weights (Bolić et al., 2003)."""
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
