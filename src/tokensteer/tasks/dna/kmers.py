"""Statistics of sequences of four letters: k-mers, Markov chains, correlations, AUC."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokensteer.tasks.common.metrics import Measured, measured

SIZE = 4  # of the alphabet


def kmers(ids: Tensor, k: int) -> Tensor:
    """The k-mer that begins at each site of ids (P, L), as a number with the first letter first, (P, L - k + 1)."""
    places = SIZE ** torch.arange(k - 1, -1, -1, device=ids.device)
    return (ids.long().unfold(1, k, 1) * places).sum(-1)


def kmer_shares(ids: Tensor, k: int, weights: Tensor | None = None) -> Tensor:
    """The share of each k-mer in ids (P, L), (4^k,), of sequences with weights (P,), equal if not given."""
    words = kmers(ids, k)
    weights = torch.ones(len(ids), device=ids.device) if weights is None else weights
    counts = torch.zeros(SIZE**k, dtype=torch.float64, device=ids.device)
    counts.index_add_(0, words.flatten(), weights.double().unsqueeze(-1).expand(words.shape).flatten())
    return counts / counts.sum()


def distinct_kmers(ids: Tensor, k: int) -> float:
    """The share of distinct k-mers among all k-mers of ids (P, L)."""
    words = kmers(ids, k)
    return int((torch.bincount(words.flatten()) > 0).sum()) / words.numel()


def pearson(a: Tensor, b: Tensor) -> Tensor:
    """The correlation of a (..., K) with b (..., K), (...)."""
    a, b = (x.double() - x.double().mean(-1, keepdim=True) for x in (a, b))
    return (a * b).sum(-1) / ((a * a).sum(-1) * (b * b).sum(-1)).sqrt()


def markov_bits(train: Tensor, test: Tensor, order: int) -> Measured:
    """Bits per letter of test (P, L) under a Markov chain fitted to train (D, L) with a pseudocount of one. Chains of
    lower order predict the first letters."""
    nats = torch.zeros(len(test), dtype=torch.float64)
    for memory in range(order + 1):
        table = torch.ones(SIZE**memory, SIZE, dtype=torch.float64)
        counts = torch.bincount(kmers(train, memory + 1).flatten(), minlength=SIZE ** (memory + 1))
        table += counts.view(-1, SIZE)
        log_p = (table / table.sum(-1, keepdim=True)).log().flatten()
        terms = -log_p[kmers(test, memory + 1)]  # of letters with as many before them
        nats += terms.sum(-1) if memory == order else terms[:, 0]
    return measured(nats / (math.log(2) * test.shape[1]))


def auc(scores: Tensor, positive: Tensor) -> Measured:
    """The probability that a positive in scores (P,) exceeds a negative, ties counted half, with DeLong's error."""
    scores, positive = scores.double().cpu(), positive.cpu()
    high, low = scores[positive].sort().values, scores[~positive].sort().values
    if not len(high) or not len(low):
        return Measured(math.nan, math.nan)
    beaten, beating = _share_below(low, high), 1.0 - _share_below(high, low)
    variance = beaten.var() / len(high) + beating.var() / len(low)
    return Measured(float(beaten.mean()), math.sqrt(float(variance)))


def _share_below(ordered: Tensor, values: Tensor) -> Tensor:
    """The share of ordered numbers (N,) below each of values (M,), ties counted half."""
    below = torch.searchsorted(ordered, values) + torch.searchsorted(ordered, values, right=True)
    return below.double() / (2 * len(ordered))
