"""What networks said of particles, kept so that it is computed once.

Most particles are twins of others, or stand where they stood a step ago. A prediction keeps one row of laws for each
distinct state and the row of each particle; a step asks the networks about the states that are new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from tokensteer.core.categorical.forms import CategoricalStore
from tokensteer.core.categorical.sites import SiteDistributions
from tokensteer.core.numerics.rows import unique


@dataclass(frozen=True)
class Prediction:
    """What the networks said at the states x (P, L): one store of laws for each model, with L laws a row side by side,
    and which of them is that of each site, `index` (P, L). Twins share a row, so that taking particles copies integers.
    Without any stores it says who has moved since, and no more."""

    x: Tensor
    index: Tensor
    stores: tuple[CategoricalStore, ...]

    def take(self, rows: Tensor) -> Prediction:
        return Prediction(self.x[rows], self.index[rows], self.stores)

    def laws(self, model: int = 0) -> SiteDistributions:
        return SiteDistributions(self.stores[model], self.index)

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores)


def _sites(row: Tensor, length: int) -> Tensor:
    """The laws of whole rows, (P, L)."""
    return row.unsqueeze(-1) * length + torch.arange(length, device=row.device)


def kept_stores(before: Prediction | None, models: int) -> Sequence[CategoricalStore | None]:
    """What each of so many models has said, None if that is nothing."""
    return [None] * models if before is None else before.stores


class NewRows(NamedTuple):
    """The particles `new` (n,) of which nothing is known, one of each kind of them, `asked` (k,), and the kind of each,
    `which` (n,)."""

    new: Tensor
    asked: Tensor
    which: Tensor


def changed(x: Tensor, *before: Prediction | None) -> Tensor:
    """The particles about which one of `before` says nothing, (n,)."""
    known = [prediction for prediction in before if prediction is not None]
    if len(known) < len(before):
        return torch.arange(len(x), device=x.device)
    return reduce(torch.logical_or, ((x != prediction.x).any(-1) for prediction in known)).nonzero().squeeze(-1)


def each_apart(new: Tensor) -> NewRows:
    """Particles that have nothing in common."""
    return NewRows(new, new, torch.arange(len(new), device=new.device))


def updated(x: Tensor, news: NewRows, stores: tuple[CategoricalStore, ...], before: Prediction | None) -> Prediction:
    """`before` with fresh answers of the stores, whose rows are those `asked`, for what is new."""
    new, _, which = news
    if before is None or len(new) == len(x):
        return Prediction(x, _sites(which, x.shape[1]), stores)
    if not len(new):
        return Prediction(x, before.index, before.stores)
    old = torch.ones_like(x[:, 0], dtype=torch.bool).index_fill(0, new, False).nonzero().squeeze(-1)
    length, rows = x.shape[1], torch.empty_like(x[:, 0])
    kept, row = unique(before.index[old, 0] // length)
    sites = _sites(kept, length).flatten()
    rows = rows.index_copy(0, old, row).index_copy(0, new, len(kept) + which)
    joined = tuple(a.select(sites).join(b) for a, b in zip(before.stores, stores, strict=True))
    return Prediction(x, _sites(rows, length), joined)
