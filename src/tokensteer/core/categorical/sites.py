"""Distributions of the clean token, one for each site of each particle.

A prediction is large, particles × sites × vocabulary, and most of it is never read: equal and unmoved particles share
theirs, and a step needs tokens only where sites open. A `Categorical` holds K distributions, and `SiteDistributions`
holds the index of each site's, so that taking particles copies integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from tokensteer.core.categorical.forms import Categorical, LogProbs, rows_at_once
from tokensteer.core.numerics.capture import capturing
from tokensteer.core.numerics.draws import NEVER, uniforms


@dataclass(frozen=True)
class SiteDistributions:
    """The distribution in `store` of each site: index (P, L), -1 at sites whose distribution is never read."""

    store: Categorical
    index: Tensor

    @property
    def vocab_size(self) -> int:
        return self.store.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        return self.store.dtype

    @property
    def device(self) -> torch.device:
        return self.index.device

    def take(self, rows: Tensor) -> SiteDistributions:
        """The distributions of a selection of particles."""
        return replace(self, index=self.index[rows])

    def columns(self, sites: slice) -> SiteDistributions:
        """The distributions of a slice of sites."""
        return replace(self, index=self.index[:, sites])

    def at(self, where: Tensor) -> Tensor:
        """Whole distributions at the sites `where` (P, L), (k, V)."""
        return self.store.rows(self.index[where])

    def entry(self, y: Tensor, where: Tensor) -> Tensor:
        """The log-mass of the tokens y (P, L) at the sites `where`, 0 elsewhere."""
        return self.score(self.store.entries, y, where)

    def score(self, score: Callable[[Tensor, Tensor], Tensor], y: Tensor, where: Tensor) -> Tensor:
        """score(index, tokens), (k,), (k,) -> (k,), for the tokens y (P, L) at the sites `where`, 0 elsewhere."""
        index, sites = self._index_at(where)
        read = score(index, y.flatten() if sites is None else y[sites])
        return _put(where & (self.index >= 0), sites, read)

    def read(self, score: Callable[[Tensor], Tensor], where: Tensor) -> Tensor:
        """score(index), (k,) -> (k,), at the sites `where`, 0 elsewhere, (P, L)."""
        index, sites = self._index_at(where)
        return _put(where & (self.index >= 0), sites, score(index))

    @property
    def normalised(self) -> bool:
        return self.store.normalised

    def draw(
        self, where: Tensor, draws: int, generator: Generator | None, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`draws` tokens at each of the sites `where`, and their log-probabilities, (draws, P, L); 0 elsewhere. Uses
        the generator, or the uniforms `noise`, (P, L, draws), or (L, draws) shared by all rows."""
        index, sites = self._index_at(where)
        if noise is None:
            u = uniforms((len(index), draws), index, generator)
        else:
            noise = noise.expand(*where.shape, draws)
            u = noise.reshape(-1, draws) if sites is None else noise[sites]
        drawn = self.store.draw(index, u)
        if sites is None:  # at an index of -1 draws are 0 already
            tokens, log_p = (values.T.reshape(draws, *where.shape) for values in drawn)
        else:
            tokens, log_p = (_put(where, sites, values) for values in drawn)
        return tokens, log_p

    def draw_one(self, where: Tensor, mask_id: int, generator: Generator | None) -> tuple[Tensor, Tensor]:
        """One token at each of the sites `where`, never the mask, and their log-probabilities, (P, L)."""
        tokens, log_p = (drawn[0] for drawn in self.draw(where, 1, generator))
        # Only NaNs draw the mask, if it is token 0. Any other token will do, since the log-probability is NaN.
        return tokens.clamp(min=1) if mask_id == 0 else tokens, log_p

    def _index_at(self, where: Tensor) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """The index (k,) of the sites `where`, and these sites. On a GPU the index has all sites, -1 outside `where`,
        and the sites are None: to count them would make the host wait."""
        if where.is_cuda:
            return torch.where(where, self.index, -1).flatten(), None
        sites = (where & (self.index >= 0)).nonzero(as_tuple=True)
        return self.index[sites], sites

    def mass(self, where: Tensor) -> Tensor:
        """The log-mass of the distributions at the sites `where`, 0 elsewhere, (P, L)."""
        if self.normalised:
            return torch.zeros(where.shape, dtype=self.dtype, device=where.device)
        return self._scored(lambda log_p: log_p.logsumexp(-1), where, 0.0)

    def each(self, score: Callable[[Tensor], Tensor], where: Tensor) -> Tensor:
        """A score of whole distributions, (k, V) -> (k,), at the sites `where`, -inf elsewhere, (P, L)."""
        return self._scored(score, where, NEVER)

    def _scored(self, score: Callable[[Tensor], Tensor], where: Tensor, elsewhere: float) -> Tensor:
        if capturing():  # the host cannot count the sites, so all are scored
            scored = self._by_parts(score, self.index.clamp(min=0).flatten()).view(where.shape)
            return torch.where(where, scored, elsewhere)
        answer = torch.full(where.shape, elsewhere, dtype=self.dtype, device=where.device)
        return answer.masked_scatter(where, self._by_parts(score, self.index[where]))

    def likeliest(self, where: Tensor) -> Tensor:
        """The most likely token at each of the sites `where`, (n,)."""
        return self._by_parts(lambda log_p: log_p.argmax(-1), self.index[where])

    def _by_parts(self, score: Callable[[Tensor], Tensor], index: Tensor) -> Tensor:
        """A score of many distributions, a few at a time."""
        return torch.cat([score(self.store.rows(part)) for part in torch.split(index, rows_at_once(self.vocab_size))])

    def groups(self, where: Tensor) -> Iterator[Tensor]:
        """The sites `where` (P, L) in groups, as masks (P, L), whose distributions are computed at once."""
        for sites in torch.split(where.flatten().nonzero().squeeze(-1), rows_at_once(self.vocab_size)):
            yield torch.zeros_like(where).flatten().index_fill(0, sites, True).view_as(where)

    def dense(self) -> Tensor:
        """All distributions, (P, L, V), 0 where there is none: for small vocabularies and processes without a mask."""
        known = self.index >= 0
        if capturing():
            log_p = self.store.rows(self.index.clamp(min=0).flatten()).view(*self.index.shape, self.vocab_size)
            return torch.where(known.unsqueeze(-1), log_p, 0)
        answer = torch.zeros(*self.index.shape, self.vocab_size, dtype=self.dtype, device=self.device)
        return answer.index_put(known.nonzero(as_tuple=True), self.at(known))

    def map(self, change: Callable[[Tensor], Tensor]) -> SiteDistributions:
        """The distributions after a change of their log-masses, (k, V) -> (k, V)."""
        known = self.index >= 0
        rank = known.flatten().cumsum(0).view_as(known) - 1
        return SiteDistributions(LogProbs(change(self.at(known))), torch.where(known, rank, -1))


def _put(where: Tensor, sites: tuple[Tensor, ...] | None, values: Tensor) -> Tensor:
    """Values (k, ...) at their sites, (..., P, L), 0 elsewhere."""
    values = values.movedim(0, -1)
    if sites is None:
        return torch.where(where, values.reshape(*values.shape[:-1], *where.shape), 0)
    answer = torch.zeros(*values.shape[:-1], *where.shape, dtype=values.dtype, device=values.device)
    answer[(..., *sites)] = values
    return answer


Categoricals = Tensor | SiteDistributions
"""A table of log-masses (P, L, V), or `SiteDistributions`."""


def unread(x: Tensor, vocab_size: int, dtype: torch.dtype) -> SiteDistributions:
    """Distributions at the states x (P, L) of which none is read."""
    return SiteDistributions(LogProbs(torch.zeros(1, vocab_size, dtype=dtype, device=x.device)), torch.full_like(x, -1))


def by_site(laws: Categoricals) -> SiteDistributions:
    """A table of log-masses (P, L, V) as `SiteDistributions`, which are returned as they are."""
    if isinstance(laws, SiteDistributions):
        return laws
    rows, length, vocab_size = laws.shape
    index = torch.arange(rows * length, device=laws.device).view(rows, length)
    return SiteDistributions(LogProbs(laws.reshape(-1, vocab_size).contiguous()), index)


def as_table(laws: Categoricals) -> Tensor:
    """The table of log-masses, (P, L, V)."""
    return laws.dense() if isinstance(laws, SiteDistributions) else laws


def row_groups(laws: Categoricals) -> tuple[Tensor, ...]:
    """The particles in groups (n,) whose distributions are computed at once."""
    rows, length, vocab_size = laws.shape if isinstance(laws, Tensor) else (*laws.index.shape, laws.vocab_size)
    return torch.split(torch.arange(rows, device=laws.device), max(1, rows_at_once(vocab_size) // length))


def table_rows(laws: Categoricals, rows: Tensor) -> Tensor:
    """Log-masses (n, L, V) of some particles."""
    return laws[rows] if isinstance(laws, Tensor) else laws.take(rows).dense()


def map_rows(change: Callable[[Tensor, Tensor], Tensor], laws: Categoricals) -> Tensor:
    """change(rows, log_p) for all particles, (P, L, V), with the log-masses (n, L, V) of a few rows (n,) at a time."""
    groups = row_groups(laws)
    if len(groups) == 1:
        return change(groups[0], as_table(laws))
    first, *others = groups
    part = change(first, table_rows(laws, first))
    answer = part.new_empty(sum(map(len, groups)), *part.shape[1:])
    answer[first] = part
    for rows in others:
        answer[rows] = change(rows, table_rows(laws, rows))
    return answer


def line_index(where: Tensor) -> Tensor:
    """The index of a store with one line for each site, (P, L), -1 outside `where`."""
    return torch.where(where, torch.arange(where.numel(), device=where.device).view_as(where), -1)
