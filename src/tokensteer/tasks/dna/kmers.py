"""Statistics of short words in sequences of letters: k-mers, Markov chains, correlations, ranks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokensteer.tasks.common.metrics import Measured, measured


def kmers(ids: Tensor, k: int, letters: int = 4) -> Tensor:
    """The k-mer that begins at each site of ids (P, L), as a number with the first letter in front: (P, L - k + 1)."""
    places = letters ** torch.arange(k - 1, -1, -1, device=ids.device)
    return (ids.long().unfold(1, k, 1) * places).sum(-1)


def kmer_shares(ids: Tensor, k: int, weights: Tensor | None = None, letters: int = 4) -> Tensor:
    """The share of each k-mer in ids (P, L), (letters^k,), where a sequence counts by its weight (P,) if there are."""
    words = kmers(ids, k, letters)
    weights = torch.ones(len(ids), device=ids.device) if weights is None else weights
    counts = torch.zeros(letters**k, dtype=torch.float64, device=ids.device)
    counts.index_add_(0, words.flatten(), weights.double().unsqueeze(-1).expand(words.shape).flatten())
    return counts / counts.sum()


def distinct_kmers(ids: Tensor, k: int) -> float:
    """Of all k-mers in ids (P, L), the share that are different."""
    words = kmers(ids, k)
    return int((torch.bincount(words.flatten()) > 0).sum()) / words.numel()


def pearson(a: Tensor, b: Tensor) -> Tensor:
    """The correlation of a (..., K) with b (..., K), (...)."""
    a, b = (x.double() - x.double().mean(-1, keepdim=True) for x in (a, b))
    return (a * b).sum(-1) / ((a * a).sum(-1) * (b * b).sum(-1)).sqrt()


def markov_bits(train: Tensor, test: Tensor, order: int = 2, letters: int = 4) -> Measured:
    """Bits per letter of test (P, L) under a Markov chain of so many letters' memory, fitted to train (D, L) with one
    count added to each; a chain of order 2 knows 3-mers. The first letters have what is known of shorter words."""
    nats = torch.zeros(len(test), dtype=torch.float64)
    for memory in range(order + 1):
        table = torch.ones(letters**memory, letters, dtype=torch.float64)
        table += torch.bincount(kmers(train, memory + 1, letters).flatten(), minlength=letters ** (memory + 1)).view(
            -1, letters
        )
        log_p = (table / table.sum(-1, keepdim=True)).log().flatten()
        terms = -log_p[kmers(test, memory + 1, letters)]  # of the letters that have this much before them
        nats += terms.sum(-1) if memory == order else terms[:, 0]
    return measured(nats / (math.log(2) * test.shape[1]))


def auc(scores: Tensor, positive: Tensor) -> Measured:
    """The chance that a positive scores higher than a negative (ties count half), of scores (P,) and booleans (P,).

    The error is that of DeLong: of the chance, seen by each positive and by each negative.
    """
    scores, positive = scores.double().cpu(), positive.cpu()
    high, low = scores[positive].sort().values, scores[~positive].sort().values
    if not len(high) or not len(low):
        return Measured(math.nan, math.nan)
    beaten = (torch.searchsorted(low, high) + torch.searchsorted(low, high, right=True)).double() / (2 * len(low))
    beating = 1.0 - (torch.searchsorted(high, low) + torch.searchsorted(high, low, right=True)).double() / (
        2 * len(high)
    )
    variance = beaten.var() / len(high) + beating.var() / len(low)
    return Measured(float(beaten.mean()), math.sqrt(float(variance)))
