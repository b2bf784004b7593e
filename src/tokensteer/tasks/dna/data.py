"""Accessible DNA sites of 200 bp of four cell types, and functions of letters.

`dhs200_4cell.npz` holds `seq_ACGT` (D, 200) in 0..3 for A, C, G, T, `cell` and `split` (D,) with their names `cells`
and `splits`. The split is by chromosome, 1 for testing and 2 for validation, so that no test site is a neighbour of a
training site. The file does not come with the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor

from tokensteer.tasks.common import arrays as arrays_in
from tokensteer.tasks.common.arrays import Examples
from tokensteer.tasks.common.task import data_file

FILE = "dhs200_4cell.npz"
LETTERS = "ACGT"
LENGTH = 200
MASK = 4
VOCAB_SIZE = 5
CELLS = ("HepG2", "K562", "GM12878", "hESCT0")  # the cell types in the order of their goals and labels

COMPLEMENT = torch.tensor([3, 2, 1, 0, MASK])


@dataclass(frozen=True)
class Data:
    """Sites with the places in `CELLS` of the cell types in which they are open."""

    train: Examples
    validation: Examples
    test: Examples


def data() -> Data:
    """Sites to train on, those of chromosome 2 for validation, and those of chromosome 1 for testing."""
    file = data_file(FILE, "; docs/dna.md says what is in it")
    names = ("seq_ACGT", "cell", "split", "cells", "splits")
    arrays = arrays_in.read(file, names, "docs/dna.md says what must be in it")
    cells, splits = [str(name) for name in arrays["cells"]], [str(name) for name in arrays["splits"]]
    if set(cells) != set(CELLS) or set(splits) != {"training", "validation", "test"}:
        raise ValueError(f"{file} has cells {cells} and splits {splits}: expected {', '.join(CELLS)}, and three splits")
    labels = torch.tensor([CELLS.index(name) for name in cells])[torch.as_tensor(arrays["cell"]).long()]
    sites, split = Examples(torch.as_tensor(arrays["seq_ACGT"]), labels), torch.as_tensor(arrays["split"])
    return Data(*(sites.take(split == splits.index(name)) for name in ("training", "validation", "test")))


def halves(sites: Examples) -> tuple[Examples, Examples]:
    """Two halves that share no site."""
    order = torch.randperm(len(sites.ids), generator=Generator().manual_seed(0))
    middle = len(order) // 2
    return sites.take(order[:middle]), sites.take(order[middle:])


def spelled(ids: Tensor) -> list[str]:
    """ids (P, L) as words."""
    return ["".join(LETTERS[i] for i in row) for row in arrays_in.to_lists(ids)]


def read_letters(words: list[str]) -> Tensor:
    """Words of equal length as ids (P, L)."""
    strange = sorted(set("".join(words)) - set(LETTERS))
    if strange:
        raise ValueError(f"DNA is made of {', '.join(LETTERS)}, got {', '.join(strange)}")
    codes = np.zeros(128, np.int64)
    codes[list(LETTERS.encode())] = range(len(LETTERS))
    ids = codes[np.frombuffer("".join(words).encode(), np.uint8)]
    return torch.as_tensor(ids).view(len(words), len(words[0]))


def reverse_complement(ids: Tensor) -> Tensor:
    """The other strand of ids (P, L), in its own direction."""
    return COMPLEMENT.to(ids.device)[ids.long()].flip(-1)


Augment = Callable[[Tensor, Generator], Tensor]


def either_strand(ids: Tensor, generator: Generator) -> Tensor:
    """Each of ids (P, L) or its other strand, with equal probability."""
    turn = torch.rand(len(ids), 1, generator=generator, device=ids.device) < 0.5
    return torch.where(turn, reverse_complement(ids), ids)


def harder(shift: int, wrong: float) -> Augment:
    """Either strand, shifted by up to `shift` letters, with random letters at the end that this opens and at a share
    `wrong` of all sites. It keeps classifiers from depending on a few letters that steering could exploit."""

    def augment(ids: Tensor, generator: Generator) -> Tensor:
        rows, length = ids.shape
        device = ids.device
        move = torch.randint(-shift, shift + 1, (rows, 1), generator=generator, device=device)
        source = torch.arange(length, device=device) + move
        moved = either_strand(ids, generator).gather(1, source.clamp(0, length - 1))
        inside = (0 <= source) & (source < length)
        noise = torch.randint(len(LETTERS), ids.shape, generator=generator, device=device)
        kept = torch.rand(ids.shape, generator=generator, device=device) >= wrong
        return torch.where(inside & kept, moved, noise)

    return augment
