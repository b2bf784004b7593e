"""Laws over the vocabulary, in whatever form the network gave them.

A softmax is computed where a law is read and nowhere else. What is drawn and what is evaluated are the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from tokensteer.core.categorical.fused import (
    draw_from_head,
    draw_from_logits,
    head_logits,
    log_prob_from_head,
    log_prob_from_logits,
)
from tokensteer.core.numerics.capture import capturing
from tokensteer.core.numerics.draws import NEVER, WORKING


class Categorical(Protocol):
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


class CategoricalStore(Categorical, Protocol):
    """Laws that are kept from step to step."""

    @property
    def nbytes(self) -> int: ...
    def select(self, index: Tensor) -> Self: ...
    def join(self, other: Self) -> Self:
        """These laws and the others after them."""
        ...

    def room(self, laws: int) -> Self:
        """A store of this kind for so many laws, not yet written."""
        ...

    def put(self, first: int, other: Self) -> None:
        """Write the laws of another store into this one, from the place `first` on."""
        ...


class StoredRows:
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

    def join(self, other: Self) -> Self:
        more = other._lines()
        return self._with({name: torch.cat([own, more[name]]) for name, own in self._lines().items()})

    def room(self, laws: int) -> Self:
        return self._with({name: own.new_empty(laws, *own.shape[1:]) for name, own in self._lines().items()})

    def put(self, first: int, other: Self) -> None:
        for name, lines in other._lines().items():
            getattr(self, name)[first : first + len(lines)] = lines


class StoreBuffer:
    """A store of so many laws that is filled a stretch at a time: what is said of a part goes where it will lie at
    once, so that nothing is ever there twice."""

    def __init__(self, laws: int) -> None:
        self.laws = laws
        self._store: CategoricalStore | None = None

    def put(self, first: int, part: CategoricalStore, laws: int) -> None:
        """So many laws, from the place `first` on."""
        if laws == self.laws:
            self._store = part
            return
        self._store = part.room(self.laws) if self._store is None else self._store
        self._store.put(first, part)

    @property
    def store(self) -> CategoricalStore:
        assert self._store is not None, "there is always a stretch"
        return self._store


@dataclass(frozen=True)
class LogProbs(StoredRows):
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
class Logits(StoredRows):
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
class HiddenLogits(StoredRows):
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
    """log-softmax in float32 at least, the mask forbidden. The logits, of which there may be many, are overwritten."""
    if 0 <= mask_id < logits.shape[-1]:
        logits[..., mask_id] = NEVER
    return logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))


def draw_by_parts(rows: Callable[[Tensor], Tensor], vocab_size: int, index: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """`Law.draw` from laws spelt out by rows(index), (k, V), a few at a time and those alone that are asked for."""

    def draw(asked: Tensor) -> tuple[Tensor, Tensor]:
        laws = rows(index[asked].clamp(min=0))
        return draw_from_logits(laws, torch.arange(len(laws), device=laws.device), u[asked], None)

    asked = _asked_for(index)
    drawn = zip(*map(draw, torch.split(asked, laws_at_once(vocab_size))), strict=True)
    tokens, log_p = (_spread(index, asked, torch.cat(parts)) for parts in drawn)
    return tokens, log_p


def score_by_parts(score: Callable[[Tensor], Tensor], vocab_size: int, index: Tensor) -> Tensor:
    """A score of laws by their index, (k,) -> (k,), a few at a time; 0 where the index is -1."""
    asked = _asked_for(index)
    parts = [score(index[part].clamp(min=0)) for part in torch.split(asked, laws_at_once(vocab_size))]
    return _spread(index, asked, torch.cat(parts))


def _asked_for(index: Tensor) -> Tensor:
    """The places of an index (k,) that ask for a law, (n,); all while a run is recorded, for the host cannot count."""
    return torch.arange(len(index), device=index.device) if capturing() else (index >= 0).nonzero().squeeze(-1)


def _spread(index: Tensor, asked: Tensor, values: Tensor) -> Tensor:
    """Values (n, ...) for the places `asked` (n,) of an index (k,), 0 at those that ask for nothing, (k, ...)."""
    if len(asked) == len(index):
        return torch.where((index >= 0).view(-1, *(1,) * (values.dim() - 1)), values, 0)
    return values.new_zeros(len(index), *values.shape[1:]).index_copy(0, asked, values)


def laws_at_once(vocab_size: int) -> int:
    """How many laws are spelt out at once."""
    return max(1, WORKING // (16 * vocab_size))
