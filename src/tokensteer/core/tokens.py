"""Laws of the clean token, one for each site of each particle.

A prediction is large: particles × sites × vocabulary. Most of it is never read: twins and particles that have not moved
share theirs, open sites keep their tokens, and a step asks for tokens only where sites open. So the numbers lie in a
`Store` of K laws, in whatever form the network gave them, and `Tokens` says which of them belongs to which site. Taking
particles copies integers; a softmax is computed where a law is read and nowhere else. What is drawn and what is
evaluated are the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self

import torch
from torch import Generator, Tensor, nn

from tokensteer.core.draws import NEVER, uniforms
from tokensteer.core.fused import (
    draw_from_head,
    draw_from_logits,
    head_logits,
    log_prob_from_head,
    log_prob_from_logits,
)
from tokensteer.core.recording import recording

WORKING = 2**28  # bytes of laws spelt out at once


class Law(Protocol):
    """K laws over the vocabulary as logs, perhaps unnormalised. An index of -1 asks for nothing and gets 0."""

    normalised: ClassVar[bool]
    """Whether the laws sum to one by themselves, whatever they are."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype:
        """The precision of the law, float32 or float64, whatever its form of keeping."""
        ...

    def rows(self, index: Tensor) -> Tensor:
        """Whole laws, (k, V)."""
        ...

    def entries(self, index: Tensor, tokens: Tensor) -> Tensor:
        """The log-mass of one token of each, (k,)."""
        ...

    def draw(self, index: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (k, M) from uniforms u (k, M) in (0, 1], each law normalised by its own mass, and their
        log-probabilities."""
        ...


class Store(Law, Protocol):
    """Laws that are kept from step to step."""

    @property
    def nbytes(self) -> int: ...
    def select(self, index: Tensor) -> Self: ...
    def join(self, *others: Self) -> Self:
        """These laws and the others after them."""
        ...

    def room(self, laws: int) -> Self:
        """A store of this kind for so many laws, not yet written."""
        ...

    def put(self, first: int, other: Self) -> None:
        """Write the laws of another store into this one, from the place `first` on."""
        ...


class KeptLaws:
    """A store is a dataclass, some of whose fields, `by_law`, have a line for each law."""

    by_law: ClassVar[tuple[str, ...]]

    def _lines(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.by_law}

    def _with(self, lines: dict[str, Tensor]) -> Self:
        return replace(self, **lines)  # pyright: ignore[reportArgumentType, reportCallIssue, reportUnknownVariableType]

    @property
    def nbytes(self) -> int:
        return sum(lines.nbytes for lines in self._lines().values())

    def select(self, index: Tensor) -> Self:
        return self._with({name: lines[index] for name, lines in self._lines().items()})

    def join(self, *others: Self) -> Self:
        parts = [other._lines() for other in others]
        return self._with(
            {name: torch.cat([own, *(part[name] for part in parts)]) for name, own in self._lines().items()}
        )

    def room(self, laws: int) -> Self:
        return self._with({name: own.new_empty(laws, *own.shape[1:]) for name, own in self._lines().items()})

    def put(self, first: int, other: Self) -> None:
        for name, lines in other._lines().items():
            getattr(self, name)[first : first + len(lines)] = lines


def joined(stores: Sequence[Store]) -> Store:
    """Stores of one kind, one after the other, in one copy or, of a single one, none."""
    first, *rest = stores
    return first.join(*rest) if rest else first


@dataclass(frozen=True)
class Logs(KeptLaws):
    """Laws as they are: log-masses (K, V). Also any other numbers on the vocabulary, such as a gradient."""

    values: Tensor
    by_law: ClassVar[tuple[str, ...]] = ("values",)
    normalised: ClassVar[bool] = False

    @property
    def vocab_size(self) -> int:
        return self.values.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def rows(self, index: Tensor) -> Tensor:
        return self.values[index]

    def entries(self, index: Tensor, tokens: Tensor) -> Tensor:
        return self.values[index, tokens]

    def draw(self, index: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return draw_from_logits(self.values, index, u, None)


@dataclass(frozen=True)
class Logits(KeptLaws):
    """A network's raw answers (K, V) in its own precision: the law is their softmax in float32, the mask forbidden."""

    values: Tensor
    mask_id: int
    by_law: ClassVar[tuple[str, ...]] = ("values",)
    normalised: ClassVar[bool] = True

    @property
    def vocab_size(self) -> int:
        return self.values.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.values.dtype, torch.float32)

    def rows(self, index: Tensor) -> Tensor:
        return log_law(self.values[index], self.mask_id)

    def entries(self, index: Tensor, tokens: Tensor) -> Tensor:
        return log_prob_from_logits(self.values, index, tokens, self.mask_id)

    def draw(self, index: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return draw_from_logits(self.values, index, u, self.mask_id)


@dataclass(frozen=True)
class Headed(KeptLaws):
    """A network's last hidden states (K, H) and its linear head, which is applied to the sites that are read."""

    states: Tensor
    head: nn.Linear
    mask_id: int
    by_law: ClassVar[tuple[str, ...]] = ("states",)
    normalised: ClassVar[bool] = True

    @property
    def vocab_size(self) -> int:
        return self.head.out_features

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.states.dtype, torch.float32)

    def rows(self, index: Tensor) -> Tensor:
        return log_law(head_logits(self.states[index], self.head.weight, self.head.bias), self.mask_id)

    def entries(self, index: Tensor, tokens: Tensor) -> Tensor:
        weight, bias = self.head.weight, self.head.bias
        return log_prob_from_head(self.states, weight, bias, index, tokens, self.mask_id)

    def draw(self, index: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return draw_from_head(self.states, self.head.weight, self.head.bias, index, u, self.mask_id)


def log_law(logits: Tensor, mask_id: int) -> Tensor:
    """log-softmax in float32 at least, the mask forbidden."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if 0 <= mask_id < logits.shape[-1]:
        logits = logits.index_fill(-1, torch.full((1,), mask_id, device=logits.device), NEVER)
    return logits.log_softmax(-1)


@dataclass(frozen=True)
class Tokens:
    """Which law of a store is whose: index (P, L), -1 at sites that have none because nobody reads them."""

    store: Law
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

    def take(self, rows: Tensor) -> Tokens:
        """The laws of a selection of particles."""
        return replace(self, index=self.index[rows])

    def columns(self, sites: slice) -> Tokens:
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
        self, where: Tensor, draws: int, generator: Generator | None, shared: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`draws` tokens for each of the sites `where`, and their log-probabilities, (draws, P, L); 0 elsewhere. They
        come from uniforms of their own, or from those that all rows have in common, `shared` (draws, L)."""
        index, sites = self._asked(where)
        if shared is None:
            u = uniforms((len(index), draws), index, generator)
        else:
            u = shared.T.repeat(len(where), 1) if sites is None else shared.T[sites[1]]
        drawn = self.store.draw(index, u)
        if sites is None:  # a draw from nothing is 0 as it is
            tokens, log_p = (values.T.reshape(draws, *where.shape) for values in drawn)
        else:
            tokens, log_p = (_put(where, sites, values) for values in drawn)
        return tokens, log_p

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
        if recording():  # the host cannot count the sites, so that all are looked at
            scored = self._by_parts(score, self.index.clamp(min=0).flatten()).view(where.shape)
            return torch.where(where, scored, elsewhere)
        answer = torch.full(where.shape, elsewhere, dtype=self.dtype, device=where.device)
        return answer.masked_scatter(where, self._by_parts(score, self.index[where]))

    def likeliest(self, where: Tensor) -> Tensor:
        """The token of most mass at each of the sites `where`, (n,)."""
        return self._by_parts(lambda laws: laws.argmax(-1), self.index[where])

    def _by_parts(self, score: Callable[[Tensor], Tensor], index: Tensor) -> Tensor:
        """A score of many laws, a few at a time."""
        return torch.cat([score(self.store.rows(part)) for part in torch.split(index, _few(self.vocab_size))])

    def dense(self) -> Tensor:
        """All laws, (P, L, V), 0 where there is none: for small vocabularies and processes without a mask."""
        known = self.index >= 0
        if recording():  # as above
            laws = self.store.rows(self.index.clamp(min=0).flatten()).view(*self.index.shape, self.vocab_size)
            return torch.where(known.unsqueeze(-1), laws, 0)
        answer = torch.zeros(*self.index.shape, self.vocab_size, dtype=self.dtype, device=self.device)
        return answer.index_put(known.nonzero(as_tuple=True), self.at(known))

    def map(self, change: Callable[[Tensor], Tensor]) -> Tokens:
        """The laws changed, (k, V) -> (k, V)."""
        known = self.index >= 0
        return at_sites(known, change(self.at(known)))


def draw_by_parts(rows: Callable[[Tensor], Tensor], vocab_size: int, index: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """`Law.draw` from laws spelt out by rows(index), (k, V), a few at a time and those alone that are asked for."""

    def draw(asked: Tensor) -> tuple[Tensor, Tensor]:
        laws = rows(index[asked].clamp(min=0))
        return draw_from_logits(laws, torch.arange(len(laws), device=laws.device), u[asked], None)

    asked = _asked_for(index)
    drawn = zip(*map(draw, torch.split(asked, _few(vocab_size))), strict=True)
    tokens, log_p = (_spread(index, asked, torch.cat(parts)) for parts in drawn)
    return tokens, log_p


def score_by_parts(score: Callable[[Tensor], Tensor], vocab_size: int, index: Tensor) -> Tensor:
    """A score of laws by their index, (k,) -> (k,), a few at a time; 0 where the index is -1."""
    asked = _asked_for(index)
    parts = [score(index[part].clamp(min=0)) for part in torch.split(asked, _few(vocab_size))]
    return _spread(index, asked, torch.cat(parts))


def _asked_for(index: Tensor) -> Tensor:
    """The places of an index (k,) that ask for a law, (n,); all while a run is recorded, for the host cannot count."""
    return torch.arange(len(index), device=index.device) if recording() else (index >= 0).nonzero().squeeze(-1)


def _spread(index: Tensor, asked: Tensor, values: Tensor) -> Tensor:
    """Values (n, ...) for the places `asked` (n,) of an index (k,), 0 at those that ask for nothing, (k, ...)."""
    if len(asked) == len(index):
        return torch.where((index >= 0).view(-1, *(1,) * (values.dim() - 1)), values, 0)
    return values.new_zeros(len(index), *values.shape[1:]).index_copy(0, asked, values)


def _few(vocab_size: int) -> int:
    """How many laws are spelt out at once."""
    return max(1, WORKING // (16 * vocab_size))


def row_by_row(where: Tensor, vocab_size: int) -> Iterator[Tensor]:
    """The sites `where` (P, L) in groups of rows, as masks (P, L), whose laws can be spelt out at once."""
    few = max(1, WORKING // (8 * vocab_size * where.shape[1]))
    for rows in torch.split(torch.arange(len(where), device=where.device), few):
        yield torch.zeros_like(where).index_copy(0, rows, where[rows])


def _put(where: Tensor, sites: tuple[Tensor, ...] | None, values: Tensor) -> Tensor:
    """Values (k, ...) back at their sites, (..., P, L), 0 elsewhere."""
    values = values.movedim(0, -1)
    if sites is None:
        return torch.where(where, values.reshape(*values.shape[:-1], *where.shape), 0)
    answer = torch.zeros(*values.shape[:-1], *where.shape, dtype=values.dtype, device=values.device)
    answer[(..., *sites)] = values
    return answer


Laws = Tensor | Tokens


def tokens_of(laws: Laws) -> Tokens:
    """Logs (P, L, V) as they are, or laws already kept."""
    if isinstance(laws, Tokens):
        return laws
    rows, length, vocab_size = laws.shape
    index = torch.arange(rows * length, device=laws.device).view(rows, length)
    return Tokens(Logs(laws.reshape(-1, vocab_size).contiguous()), index)


def dense_of(laws: Laws) -> Tensor:
    """Logs (P, L, V)."""
    return laws.dense() if isinstance(laws, Tokens) else laws


def at_sites(where: Tensor, values: Tensor) -> Tokens:
    """Logs (k, V) for the sites `where` (P, L) alone."""
    rank = where.flatten().cumsum(0).view_as(where) - 1
    return Tokens(Logs(values), torch.where(where, rank, -1))
