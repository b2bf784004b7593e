"""Predictions of networks, stored so that each is computed once.

Many particles are copies of others or have not moved since the last step. A prediction stores one row of distributions
for each distinct state and the row of each particle; a step runs the networks on new states only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from tokensteer.core.categorical.forms import CategoricalStore
from tokensteer.core.categorical.sites import SiteDistributions
from tokensteer.core.numerics.rows import unique
from tokensteer.core.particles.path import Evaluation, Rows


@dataclass(frozen=True)
class Prediction:
    """The networks' distributions at the states x (P, L).

    There is one store for each model, with L consecutive distributions a row; `index` (P, L) is the entry of each site.
    Equal states share a row, so selecting particles copies integers only. Without stores a prediction only tells which
    particles have moved since.
    """

    x: Tensor
    index: Tensor
    stores: tuple[CategoricalStore, ...]

    def take(self, rows: Tensor) -> Prediction:
        return Prediction(self.x[rows], self.index[rows], self.stores)

    def join(self, other: Prediction) -> Prediction:
        """These particles followed by the others. Rows of the stores that neither refers to are dropped."""
        (kept, row), (more, place) = (_rows_used(prediction) for prediction in (self, other))
        length = self.x.shape[1]
        first, second = (_entries(rows, length).flatten() for rows in (kept, more))
        stores = tuple(a.select(first).join(b.select(second)) for a, b in zip(self.stores, other.stores, strict=True))
        index = _entries(torch.cat([row, len(kept) + place]), length)
        return Prediction(torch.cat([self.x, other.x]), index, stores)

    def laws(self, model: int = 0) -> SiteDistributions:
        return SiteDistributions(self.stores[model], self.index)

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores)


def as_prediction(rows: Rows | None) -> Prediction | None:
    return rows if isinstance(rows, Prediction) else None


def stored_prediction(evaluation: Evaluation) -> Prediction:
    if not isinstance(evaluation.prediction, Prediction):
        raise ValueError("particles must be evaluated before a proposal moves them: pass what `evaluate` returned")
    return evaluation.prediction


class NewRows(NamedTuple):
    """Particles `new` (n,) without a known prediction; `distinct` (k,), one of them for each distinct state; and
    `which` (n,), the place of each new particle's state in `distinct`."""

    new: Tensor
    distinct: Tensor
    which: Tensor


def changed(x: Tensor, *before: Prediction | None) -> Tensor:
    """Particles whose state differs from that in one of `before`, (n,); all if one of these is None."""
    known = [prediction for prediction in before if prediction is not None]
    if len(known) < len(before):
        return torch.arange(len(x), device=x.device)
    return reduce(torch.logical_or, ((x != prediction.x).any(-1) for prediction in known)).nonzero().squeeze(-1)


def all_distinct(new: Tensor) -> NewRows:
    """New particles that share nothing, even if their states are equal."""
    return NewRows(new, new, torch.arange(len(new), device=new.device))


def updated(x: Tensor, news: NewRows, stores: tuple[CategoricalStore, ...], before: Prediction | None) -> Prediction:
    """`before` with new rows for the particles `news.new`; the rows of `stores` are those of `news.distinct`."""
    new, _, which = news
    if before is None or len(new) == len(x):
        return Prediction(x, _entries(which, x.shape[1]), stores)
    if not len(new):
        return Prediction(x, before.index, before.stores)
    old = torch.ones_like(x[:, 0], dtype=torch.bool).index_fill(0, new, False).nonzero().squeeze(-1)
    length, rows = x.shape[1], torch.empty_like(x[:, 0])
    kept, row = _rows_used(before.take(old))
    entries = _entries(kept, length).flatten()
    rows = rows.index_copy(0, old, row).index_copy(0, new, len(kept) + which)
    joined = tuple(a.select(entries).join(b) for a, b in zip(before.stores, stores, strict=True))
    return Prediction(x, _entries(rows, length), joined)


def _rows_used(prediction: Prediction) -> tuple[Tensor, Tensor]:
    """The rows of the stores that particles refer to, and the place among them of each particle's."""
    return unique(prediction.index[:, 0] // prediction.x.shape[1])


def _entries(rows: Tensor, length: int) -> Tensor:
    """The store entries of whole rows (P,), (P, L)."""
    return rows.unsqueeze(-1) * length + torch.arange(length, device=rows.device)
