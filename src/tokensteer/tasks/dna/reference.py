"""Statistics of the best real sites, stored with the weights, to compare samples with them without the data.

The best sites of a cell type are the `SHARE` of its real sites, of all chromosomes, that the reward network scores
highest: 598 of 11,968. (DRAKES takes the top 0.1% of 700,000 by measured activity, which is about as many.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tokensteer import tensorfile as stored
from tokensteer.rewards.motifs import Scanner, jaspar, scanner
from tokensteer.tasks.common.arrays import Examples
from tokensteer.tasks.common.metrics import hamming, in_parts
from tokensteer.tasks.common.task import Setup, weights_file
from tokensteer.tasks.dna.data import CELLS, Data
from tokensteer.tasks.dna.kmers import distinct_kmers, kmer_shares
from tokensteer.tasks.dna.model import NAME

SHARE = 0.05
CHANCE = 1e-4  # the probability that random letters contain a counted motif at a site
ROLE = "reference"


@dataclass(frozen=True)
class Reference:
    """Of the best sites of each cell type: shares of 3-mers (4, 64), and the mean count of each motif in a site (4, M),
    None without pyjaspar. `about` has the names of the motifs."""

    shares: Tensor
    motifs: Tensor | None
    about: Mapping[str, Any]

    def save(self, folder: Path) -> None:
        motifs = {} if self.motifs is None else {"motifs": self.motifs}
        stored.write(weights_file(folder, NAME, ROLE), {"3-mers": self.shares, **motifs}, self.about)


def load(folder: Path) -> Reference | None:
    """The stored reference, None if there is no file."""
    file = weights_file(folder, NAME, ROLE)
    if not file.is_file():
        return None
    tensors, about = stored.read(file)
    shares, motifs, names = tensors.get("3-mers"), tensors.get("motifs"), about.get("motifs")
    columns = len(cast("list[str]", names)) if isinstance(names, list) else None
    fits = motifs is None or motifs.shape == (len(CELLS), columns)
    if shares is None or shares.shape != (len(CELLS), 64) or not fits:
        raise ValueError(
            f"{file} does not hold the counts of the best sites: make it again by python -m tokensteer.tasks.dna "
            "--reference --out FOLDER"
        )
    return Reference(shares, motifs, about)


@cache
def motif_scanner() -> Scanner | None:
    """A scanner for JASPAR's motifs of vertebrates; None without pyjaspar."""
    try:
        return scanner(jaspar(), CHANCE)
    except ImportError:
        return None


def best_sites(sites: Examples, scores: Tensor, cell: int, share: float = SHARE) -> Tensor:
    """The sites of a cell type, (K, L), with the highest of the scores (D,)."""
    here = sites.labels == cell
    count = max(1, int(share * int(here.sum())))
    return sites.ids[here][scores[here].topk(count).indices]


def build(setup: Setup, data: Data) -> Reference:
    """The reference of the data and the stored reward network."""
    sites = Examples.joined((data.train, data.validation, data.test))
    reward = setup.load(NAME, "reward")
    log_p = in_parts(lambda x: reward(x.to(setup.device).long()), sites.ids).cpu()
    best = [best_sites(sites, log_p[:, cell], cell) for cell in range(len(CELLS))]
    counting = motif_scanner()
    about = {
        "what": f"the {SHARE:.0%} of real sites of each cell type that the reward network scores highest",
        "cells": list(CELLS),
        "sites": [len(some) for some in best],
        "median log p of the cell type": [
            round(float(log_p[sites.labels == k, k].topk(len(some)).values.median()), 4) for k, some in enumerate(best)
        ],
        "hamming": [round(float(hamming(some).mean()), 5) for some in best],
        "distinct 6-mers of 30": [round(distinct_kmers(some[:30], 6), 5) for some in best],
        "motifs": [] if counting is None else list(counting.names),
    }
    motifs = None if counting is None else torch.stack([counting(some).mean(0) for some in best])
    return Reference(torch.stack([kmer_shares(some, 3) for some in best]), motifs, about)
