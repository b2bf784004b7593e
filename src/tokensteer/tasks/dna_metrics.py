"""What is measured of sampled DNA. A number that is made of all samples together has its error from a bootstrap over
populations, which are independent."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from tokensteer.tasks.dna_counts import kmers, pearson
from tokensteer.tasks.metrics import Measured


def bootstrap(statistic: Callable[[Tensor], Tensor], populations: int, times: int = 200, seed: int = 0) -> Measured:
    """statistic(counts) of populations that count once each, and its spread if they are drawn with replacement; counts
    are (B,)."""
    whole = float(statistic(torch.ones(populations, dtype=torch.float64)))
    if populations < 2:
        return Measured(whole, float("nan"))
    drawn = torch.randint(populations, (times, populations), generator=Generator().manual_seed(seed))
    counts = [torch.bincount(row, minlength=populations).double() for row in drawn]
    return Measured(whole, float(torch.stack([statistic(row).double() for row in counts]).std()))


def median(values: Tensor, weights: Tensor) -> Measured:
    """The weighted median of values (B, N), the weights of each population adding up to one."""
    order = values.double().cpu().flatten().argsort()
    of_population = torch.arange(len(values)).repeat_interleave(values.shape[1])[order]
    sorted_values, sorted_weights = values.double().cpu().flatten()[order], weights.double().cpu().flatten()[order]

    def statistic(counts: Tensor) -> Tensor:
        reached = (sorted_weights * counts[of_population]).cumsum(0)
        return sorted_values[torch.searchsorted(reached, 0.5 * reached[-1]).clamp(max=len(reached) - 1)]

    return bootstrap(statistic, len(values))


def correlation(tables: Tensor, reference: Tensor) -> Measured:
    """Of the mean of tables (B, K), one for each population, with a reference (K,)."""
    tables, reference = tables.double().cpu(), reference.double().cpu()
    return bootstrap(lambda counts: pearson(counts @ tables, reference), len(tables))


def kmer_tables(ids: Tensor, weights: Tensor, k: int) -> Tensor:
    """For each population of ids (B, N, L), the weighted shares of its k-mers, (B, 4^k)."""
    words = kmers(ids.flatten(0, 1), k).view(*ids.shape[:2], -1)
    table = torch.zeros(len(ids), 4**k, dtype=torch.float64, device=ids.device)
    each = weights.double().unsqueeze(-1).expand(words.shape) / words.shape[-1]
    return table.scatter_add(1, words.flatten(1), each.flatten(1))
