"""Metrics of sampled DNA. Samples are weighted, with a total weight of one in each population.

    accuracy           the share for which the judge's probability of the cell type is above one half
    reward accuracy    the same by the reward network
    activity           the median of the reward network's logit log p - log(1 - p)
    3-mer correlation  Pearson's, between the shares of the 64 3-mers in the samples and in the best real sites
                       (see `reference`)
    motif correlation  the same for the counts of JASPAR's motifs, on either strand
    log-likelihood     the median over draws of a bound on log p(x) in nats under the unsteered model
    diversity          the mean share of letters at which draws of different populations differ
    distinct 6-mers    the share of distinct ones among all 6-mers of those draws
    novelty            the share of letters at which a draw differs from the nearest training site, on either strand
    MPRA               the prediction of MPRA-DragoNN, for the cell types it covers
    ess                the effective sample size over the number of particles

"Draws" are one from each population, by weight. Metrics of all samples together have their error from a bootstrap over
the independent populations. Correlations of few samples are biased low by noisy counts: compare equally many sequences.
Metrics whose data or packages are missing are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from tokensteer.core.models.denoiser import Denoiser
from tokensteer.core.particles.result import Result
from tokensteer.tasks.common import metrics as common
from tokensteer.tasks.common.metrics import Classifier, Measured, in_parts, measured, weighted
from tokensteer.tasks.common.task import data_folder
from tokensteer.tasks.dna import dragonn
from tokensteer.tasks.dna import reference as dna_reference
from tokensteer.tasks.dna.data import CELLS, FILE, LETTERS, MASK, data, reverse_complement
from tokensteer.tasks.dna.kmers import distinct_kmers, kmers, pearson
from tokensteer.tasks.dna.model import logit
from tokensteer.tasks.dna.reference import Reference


@dataclass(frozen=True)
class Metrics:
    """The metrics above, for a cell type."""

    cell: int
    denoiser: Denoiser
    reward: Classifier
    judge: Classifier
    reference: Reference | None

    def marks(self, ids: Tensor) -> Tensor:
        """1 for ids (P, L) that the judge assigns to the cell type, else 0, (P,)."""
        return (in_parts(self.judge, ids)[:, self.cell].exp() > 0.5).double()

    def __call__(self, result: Result) -> Mapping[str, Measured]:
        weights, ids = result.weights.double(), result.samples
        activity = logit(in_parts(self.reward, ids.flatten(0, 1)), self.cell).view_as(weights)
        draws = result.sample()[:, 0]
        found = {
            "accuracy": weighted(result, self.marks(ids.flatten(0, 1))),
            "reward accuracy": weighted(result, (activity > 0).double()),
            "activity": median(activity, weights),
            **self._like_real(ids, weights),
            "log-likelihood": median(self.log_likelihood(draws).unsqueeze(-1), torch.ones(len(draws), 1)),
            "diversity": measured(common.hamming(draws)),
            "distinct 6-mers": Measured(distinct_kmers(draws, 6), math.nan),
            **self._from_elsewhere(draws),
            "ess": common.ess_share(result),
        }
        if result.reward is not None:
            found["reward"] = weighted(result, result.reward)
        return found

    def _like_real(self, ids: Tensor, weights: Tensor) -> dict[str, Measured]:
        if self.reference is None:
            return {}
        found = {"3-mer correlation": correlation(kmer_tables(ids, weights, 3), self.reference.shares[self.cell])}
        scan = dna_reference.motif_scanner() if self.reference.motifs is not None else None
        if self.reference.motifs is not None and scan is not None:
            known = {name: i for i, name in enumerate(self.reference.about["motifs"])}
            ours = [i for i, name in enumerate(scan.names) if name in known]
            theirs = [known[scan.names[i]] for i in ours]
            counts = scan(ids.flatten(0, 1)).view(*ids.shape[:2], -1)[..., ours]
            tables = (weights.unsqueeze(-1) * counts).sum(1)
            found["motif correlation"] = correlation(tables, self.reference.motifs[self.cell, theirs])
        return found

    def log_likelihood(self, ids: Tensor) -> Tensor:
        """A bound on log p(x) in nats, (P,), with fixed noise."""
        generator = Generator(ids.device).manual_seed(0)
        return -common.masked_bounds(self.denoiser, ids, MASK, draws=8, generator=generator)

    def _from_elsewhere(self, draws: Tensor) -> dict[str, Measured]:
        found: dict[str, Measured] = {}
        if (data_folder() / FILE).is_file():
            found["novelty"] = measured(nearest(draws, _training_sites(data_folder() / FILE)))
        net = dragonn.find(str(draws.device)) if dragonn.covers(CELLS[self.cell]) else None
        if net is not None:
            found["MPRA"] = measured(in_parts(lambda x: dragonn.activity(net, x, CELLS[self.cell]), draws))
        return found


@cache
def _training_sites(file: Path) -> Tensor:
    return data().train.ids


def bootstrap(statistic: Callable[[Tensor], Tensor], populations: int) -> Measured:
    """statistic(counts) with counts (B,) of one for each population, and its deviation over 200 bootstrap resamples."""
    whole = float(statistic(torch.ones(populations, dtype=torch.float64)))
    if populations < 2:
        return Measured(whole, math.nan)
    drawn = torch.randint(populations, (200, populations), generator=Generator().manual_seed(0))
    counts = [torch.bincount(row, minlength=populations).double() for row in drawn]
    return Measured(whole, float(torch.stack([statistic(row).double() for row in counts]).std()))


def median(values: Tensor, weights: Tensor) -> Measured:
    """The weighted median of values (B, N), with weights that sum to one in each population."""
    order = values.double().cpu().flatten().argsort()
    of_population = torch.arange(len(values)).repeat_interleave(values.shape[1])[order]
    in_order, counted = values.double().cpu().flatten()[order], weights.double().cpu().flatten()[order]

    def statistic(counts: Tensor) -> Tensor:
        reached = (counted * counts[of_population]).cumsum(0)
        return in_order[torch.searchsorted(reached, 0.5 * reached[-1]).clamp(max=len(reached) - 1)]

    return bootstrap(statistic, len(values))


def correlation(tables: Tensor, reference: Tensor) -> Measured:
    """The correlation of the mean of tables (B, K), one for each population, with a reference (K,)."""
    tables, reference = tables.double().cpu(), reference.double().cpu()
    return bootstrap(lambda counts: pearson(counts @ tables, reference), len(tables))


def kmer_tables(ids: Tensor, weights: Tensor, k: int) -> Tensor:
    """The weighted shares of k-mers in each population of ids (B, N, L), (B, 4^k)."""
    words = kmers(ids.flatten(0, 1), k).view(*ids.shape[:2], -1)
    table = torch.zeros(len(ids), len(LETTERS) ** k, dtype=torch.float64, device=ids.device)
    each = weights.double().unsqueeze(-1).expand(words.shape) / words.shape[-1]
    return table.scatter_add(1, words.flatten(1), each.flatten(1))


def nearest(ids: Tensor, known: Tensor, rows: int = 4096) -> Tensor:
    """The share of letters, (P,), at which ids (P, L) differ from the nearest of known (D, L), on either strand."""
    both = torch.cat([ids, reverse_complement(ids)]).long()
    ours = one_hot(both, len(LETTERS)).flatten(1).float()
    most = torch.zeros(len(both), device=ids.device)
    for start in range(0, len(known), rows):
        theirs = one_hot(known[start : start + rows].to(ids.device).long(), len(LETTERS)).flatten(1).float()
        most = torch.maximum(most, (ours @ theirs.T).amax(-1))
    return 1.0 - most.view(2, -1).amax(0) / ids.shape[1]
