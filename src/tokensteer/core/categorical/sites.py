"""Laws of the clean token, one for each site of each particle.

A prediction is large: particles × sites × vocabulary. Most of it is never read: twins and particles that have not moved
share theirs, open sites keep their tokens, and a step asks for tokens only where sites open. So the numbers lie in a
`Store` of K laws, and `SiteDistributions` says which of them belongs to which site: taking particles copies integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from tokensteer.core.categorical.forms import Categorical, LogProbs, laws_at_once
from tokensteer.core.numerics.capture import capturing
from tokensteer.core.numerics.draws import NEVER, uniforms


@dataclass(frozen=True)
class SiteDistributions:
    """Which law of a store is whose: index (P, L), -1 at sites that have none because nobody reads them."""

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
        """The laws of a selection of particles."""
        return replace(self, index=self.index[rows])

    def columns(self, sites: slice) -> SiteDistributions:
        """The laws of a stretch of sites."""
        return replace(self, index=self.index[:, sites])

    def at(self, where: Tensor) -> Tensor:
        """Whole laws at the sites `where` (P, L), (k, V)."""
        return self.store.rows(self.index[where])

    def entry(self, y: Tensor, where: Tensor) -> Tensor:
        """The log-mass of the tokens y (P, L) at the sites `where`, 0 elsewhere."""
        return self.score(self.store.entries, y, where)

    def score(self, score: Callable[[Tensor, Tensor], Tensor], y: Tensor, where: Tensor) -> Tensor:
        """A score of laws and tokens by their indices (k,), (k,) -> (k,), for the tokens y (P, L) at the sites `where`,
        0 elsewhere."""
        index, sites = self._asked(where)
        read = score(index, y.flatten() if sites is None else y[sites])
        return _put(where & (self.index >= 0), sites, read)

    def read(self, score: Callable[[Tensor], Tensor], where: Tensor) -> Tensor:
        """A score of laws by their index (k,) -> (k,), at the sites `where`, 0 elsewhere, (P, L)."""
        index, sites = self._asked(where)
        return _put(where & (self.index >= 0), sites, score(index))

    @property
    def normalised(self) -> bool:
        return self.store.normalised

    def draw(
        self, where: Tensor, draws: int, generator: Generator | None, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`draws` tokens for each of the sites `where`, and their log-probabilities, (draws, P, L); 0 elsewhere. They
        come from the generator, or from the uniforms `noise`, (P, L, draws), or (L, draws) for all rows."""
        index, sites = self._asked(where)
        if noise is None:
            u = uniforms((len(index), draws), index, generator)
        else:
            noise = noise.expand(*where.shape, draws)
            u = noise.reshape(-1, draws) if sites is None else noise[sites]
        drawn = self.store.draw(index, u)
        if sites is None:  # a draw from nothing is 0 as it is
            tokens, log_p = (values.T.reshape(draws, *where.shape) for values in drawn)
        else:
            tokens, log_p = (_put(where, sites, values) for values in drawn)
        return tokens, log_p

    def draw_one(self, where: Tensor, mask_id: int, generator: Generator | None) -> tuple[Tensor, Tensor]:
        """One token for each of the sites `where`, never the mask, and their log-probabilities, (P, L)."""
        tokens, log_p = (drawn[0] for drawn in self.draw(where, 1, generator))
        # Only a law of NaNs lands on the mask, if that is token 0; any other will do, for the log-probability is NaN.
        return tokens.clamp(min=1) if mask_id == 0 else tokens, log_p

    def _asked(self, where: Tensor) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """The laws (k,) of the sites `where`, and the sites. On a GPU these are all sites, -1 where nothing is asked:
        how many there are is not known to the host, and finding out would make it wait."""
        if where.is_cuda:
            return torch.where(where, self.index, -1).flatten(), None
        sites = (where & (self.index >= 0)).nonzero(as_tuple=True)
        return self.index[sites], sites

    def mass(self, where: Tensor) -> Tensor:
        """log sum_v of the laws at the sites `where`, 0 elsewhere, (P, L)."""
        if self.normalised:
            return torch.zeros(where.shape, dtype=self.dtype, device=where.device)
        return self._scored(lambda law: law.logsumexp(-1), where, 0.0)

    def each(self, score: Callable[[Tensor], Tensor], where: Tensor) -> Tensor:
        """A score of the laws (k, V) -> (k,) at the sites `where`, -inf elsewhere, (P, L)."""
        return self._scored(score, where, NEVER)

    def _scored(self, score: Callable[[Tensor], Tensor], where: Tensor, elsewhere: float) -> Tensor:
        if capturing():  # the host cannot count the sites, so that all are looked at
            scored = self._by_parts(score, self.index.clamp(min=0).flatten()).view(where.shape)
            return torch.where(where, scored, elsewhere)
        answer = torch.full(where.shape, elsewhere, dtype=self.dtype, device=where.device)
        return answer.masked_scatter(where, self._by_parts(score, self.index[where]))

    def likeliest(self, where: Tensor) -> Tensor:
        """The token of most mass at each of the sites `where`, (n,)."""
        return self._by_parts(lambda laws: laws.argmax(-1), self.index[where])

    def _by_parts(self, score: Callable[[Tensor], Tensor], index: Tensor) -> Tensor:
        """A score of many laws, a few at a time."""
        return torch.cat([score(self.store.rows(part)) for part in torch.split(index, laws_at_once(self.vocab_size))])

    def dense(self) -> Tensor:
        """All laws, (P, L, V), 0 where there is none: for small vocabularies and processes without a mask."""
        known = self.index >= 0
        if capturing():  # as above
            laws = self.store.rows(self.index.clamp(min=0).flatten()).view(*self.index.shape, self.vocab_size)
            return torch.where(known.unsqueeze(-1), laws, 0)
        answer = torch.zeros(*self.index.shape, self.vocab_size, dtype=self.dtype, device=self.device)
        return answer.index_put(known.nonzero(as_tuple=True), self.at(known))

    def map(self, change: Callable[[Tensor], Tensor]) -> SiteDistributions:
        """The laws changed, (k, V) -> (k, V)."""
        known = self.index >= 0
        return at_sites(known, change(self.at(known)))


def few_by_few(where: Tensor, vocab_size: int) -> Iterator[Tensor]:
    """The sites `where` (P, L) in groups, as masks (P, L), whose laws can be spelt out at once."""
    for sites in torch.split(where.flatten().nonzero().squeeze(-1), laws_at_once(vocab_size)):
        yield torch.zeros_like(where).flatten().index_fill(0, sites, True).view_as(where)


def _put(where: Tensor, sites: tuple[Tensor, ...] | None, values: Tensor) -> Tensor:
    """Values (k, ...) back at their sites, (..., P, L), 0 elsewhere."""
    values = values.movedim(0, -1)
    if sites is None:
        return torch.where(where, values.reshape(*values.shape[:-1], *where.shape), 0)
    answer = torch.zeros(*values.shape[:-1], *where.shape, dtype=values.dtype, device=values.device)
    answer[(..., *sites)] = values
    return answer


Laws = Tensor | SiteDistributions


def tokens_of(laws: Laws) -> SiteDistributions:
    """Logs (P, L, V) as they are, or laws already kept."""
    if isinstance(laws, SiteDistributions):
        return laws
    rows, length, vocab_size = laws.shape
    index = torch.arange(rows * length, device=laws.device).view(rows, length)
    return SiteDistributions(LogProbs(laws.reshape(-1, vocab_size).contiguous()), index)


def dense_of(laws: Laws) -> Tensor:
    """Logs (P, L, V)."""
    return laws.dense() if isinstance(laws, SiteDistributions) else laws


def at_sites(where: Tensor, values: Tensor) -> SiteDistributions:
    """Logs (k, V) for the sites `where` (P, L) alone."""
    rank = where.flatten().cumsum(0).view_as(where) - 1
    return SiteDistributions(LogProbs(values), torch.where(where, rank, -1))


def few_rows(laws: Laws) -> tuple[Tensor, ...]:
    """The rows of laws (P, L) in groups (n,) that can be spelt out at once."""
    rows, length, vocab_size = laws.shape if isinstance(laws, Tensor) else (*laws.index.shape, laws.vocab_size)
    return torch.split(torch.arange(rows, device=laws.device), max(1, laws_at_once(vocab_size) // length))


def rows_of(laws: Laws, rows: Tensor) -> Tensor:
    """Logs (n, L, V) of some rows."""
    return laws[rows] if isinstance(laws, Tensor) else laws.take(rows).dense()


def row_by_row(change: Callable[[Tensor, Tensor], Tensor], laws: Laws) -> Tensor:
    """change(rows, logs) of all laws, (P, L, V), where logs (n, L, V) are those of some of the rows (n,) at a time."""
    groups = few_rows(laws)
    if len(groups) == 1:
        return change(groups[0], dense_of(laws))
    first, *others = groups
    part = change(first, rows_of(laws, first))
    answer = part.new_empty(sum(map(len, groups)), *part.shape[1:])
    answer[first] = part
    for rows in others:
        answer[rows] = change(rows, rows_of(laws, rows))
    return answer


def lines_of(where: Tensor) -> Tensor:
    """The lines of a store that has one for each site, (P, L), -1 where there is none."""
    return torch.where(where, torch.arange(where.numel(), device=where.device).view_as(where), -1)
