"""Categorical distributions over the vocabulary, in the form a network returned them.

A softmax is computed only for the distributions that are read. Draws and log-probabilities use the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from tokensteer.core.categorical.fused import LogitRows, head_logits
from tokensteer.core.numerics.capture import capturing
from tokensteer.core.numerics.draws import NEVER, WORKING


class Categorical(Protocol):
    """K distributions over the vocabulary as logs, perhaps unnormalised. At an index of -1 all results are 0."""

    normalised: ClassVar[bool]
    """Whether every distribution of this form sums to one."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype:
        """The precision of the log-probabilities, float32 or float64, whatever is stored."""
        ...

    def rows(self, index: Tensor) -> Tensor:
        """Whole distributions, (k, V)."""
        ...

    def columns(self, index: Tensor) -> Tensor:
        """Whole distributions up to a constant for each, (V, k): without the pass that normalises them."""
        return self.rows(index).T

    def entries(self, index: Tensor, tokens: Tensor) -> Tensor:
        """The log-mass of one token of each, (k,)."""
        ...

    def draw(self, index: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (k, M) from uniforms u (k, M) in (0, 1], and their log-probabilities, both after normalising."""
        ...


class CategoricalStore(Categorical, Protocol):
    """Distributions that are kept from step to step, in tensors with one line for each distribution."""

    def lines(self) -> tuple[Tensor, ...]:
        """The tensors with one line for each distribution."""
        ...

    def with_lines(self, *lines: Tensor) -> Self:
        """A copy with other lines, in the order of `lines`."""
        ...

    @property
    def nbytes(self) -> int:
        return sum(lines.nbytes for lines in self.lines())

    def select(self, index: Tensor) -> Self:
        return self.with_lines(*(lines[index] for lines in self.lines()))

    def join(self, other: Self) -> Self:
        """This store followed by the other."""
        return self.with_lines(*(torch.cat(both) for both in zip(self.lines(), other.lines(), strict=True)))

    def room(self, laws: int) -> Self:
        """An uninitialised store of this kind for `laws` distributions."""
        return self.with_lines(*(lines.new_empty(laws, *lines.shape[1:]) for lines in self.lines()))

    def put(self, first: int, other: Self) -> None:
        """Write the other store into this one, starting at `first`."""
        for own, lines in zip(self.lines(), other.lines(), strict=True):
            own[first : first + len(lines)] = lines


class StoreBuffer:
    """A preallocated store of `laws` distributions; parts are written in place."""

    def __init__(self, laws: int) -> None:
        self.laws = laws
        self._store: CategoricalStore | None = None

    def put(self, first: int, part: CategoricalStore, laws: int) -> None:
        """Write a part of `laws` distributions, starting at `first`. A part that is the whole is kept as it is."""
        if laws == self.laws:
            self._store = part
            return
        self._store = part.room(self.laws) if self._store is None else self._store
        self._store.put(first, part)

    @property
    def store(self) -> CategoricalStore:
        assert self._store is not None, "the store is read after at least one part was written"
        return self._store


@dataclass(frozen=True)
class _Values(CategoricalStore):
    """One number for each token, (K, V)."""

    values: Tensor

    def lines(self) -> tuple[Tensor, ...]:
        return (self.values,)

    def with_lines(self, *lines: Tensor) -> Self:
        return replace(self, values=lines[0])

    @property
    def vocab_size(self) -> int:
        return self.values.shape[-1]


@dataclass(frozen=True)
class LogProbs(_Values):
    """Log-masses (K, V), or other numbers on the vocabulary such as a gradient."""

    normalised: ClassVar[bool] = False

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def rows(self, index: Tensor) -> Tensor:
        return self.values[index]

    def entries(self, index: Tensor, tokens: Tensor) -> Tensor:
        return self.values[index, tokens]

    def draw(self, index: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return LogitRows(self.values, index, None).draw(u)


class Softmax(CategoricalStore):
    """A softmax in float32 or wider, in which the mask has no mass."""

    normalised: ClassVar[bool] = True

    def at(self, index: Tensor) -> LogitRows:
        """The logits of the distributions `index` (k,)."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.lines()[0].dtype, torch.float32)

    def entries(self, index: Tensor, tokens: Tensor) -> Tensor:
        return self.at(index).log_prob(tokens)

    def draw(self, index: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return self.at(index).draw(u)


@dataclass(frozen=True)
class Logits(Softmax, _Values):
    """A network's logits (K, V), in its own precision."""

    mask_id: int

    def at(self, index: Tensor) -> LogitRows:
        return LogitRows(self.values, index, self.mask_id)

    def rows(self, index: Tensor) -> Tensor:
        return masked_log_softmax(self.values[index], self.mask_id)

    def columns(self, index: Tensor) -> Tensor:
        return masked_logits(self.values[index], self.mask_id).T


@dataclass(frozen=True)
class HiddenLogits(Softmax):
    """A network's last hidden states (K, H) and its linear head, which is applied only at the sites that are read."""

    states: Tensor
    head: nn.Linear
    mask_id: int

    def lines(self) -> tuple[Tensor, ...]:
        return (self.states,)

    def with_lines(self, *lines: Tensor) -> Self:
        return replace(self, states=lines[0])

    @property
    def vocab_size(self) -> int:
        return self.head.out_features

    def at(self, index: Tensor) -> LogitRows:
        return LogitRows(self.states, index, self.mask_id, self.head.weight, self.head.bias)

    def rows(self, index: Tensor) -> Tensor:
        return masked_log_softmax(head_logits(self.states[index], self.head.weight, self.head.bias), self.mask_id)

    def columns(self, index: Tensor) -> Tensor:
        states, weight, bias = self.states[index], self.head.weight, self.head.bias
        if states.dtype != self.dtype or torch.is_autocast_enabled(states.device.type):
            logits = head_logits(states, weight, bias)
        else:  # for few states this product is faster on a CPU
            logits = (weight @ states.T).T
            logits = logits if bias is None else logits.add_(bias)  # pyright: ignore[reportUnnecessaryComparison]
        return masked_logits(logits, self.mask_id).T


class DrawnByRows(Categorical):
    """Draws from whole distributions, which are computed a few at a time, and only where they are read."""

    def masses(self, index: Tensor) -> Tensor:
        """The log-masses (k, V) that are drawn from; they need not be normalised."""
        return self.rows(index)

    def draw(self, index: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        def draw(read: Tensor) -> tuple[Tensor, Tensor]:
            log_p = self.masses(index[read].clamp(min=0))
            return LogitRows(log_p, torch.arange(len(log_p), device=log_p.device), None).draw(u[read])

        read = _places_read(index)
        drawn = zip(*map(draw, torch.split(read, rows_at_once(self.vocab_size))), strict=True)
        tokens, log_p = (_scatter(index, read, torch.cat(parts)) for parts in drawn)
        return tokens, log_p


@dataclass(frozen=True)
class Derived(DrawnByRows):
    """Numbers on the vocabulary that are computed from others, the `base`, when they are read."""

    base: Categorical

    @property
    def vocab_size(self) -> int:
        return self.base.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype


def masked_log_softmax(logits: Tensor, mask_id: int) -> Tensor:
    """log-softmax without the mask, in float32 or wider. Overwrites the mask's logit in place to save memory."""
    if 0 <= mask_id < logits.shape[-1]:
        logits[..., mask_id] = NEVER
    return logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))


def masked_logits(logits: Tensor, mask_id: int) -> Tensor:
    """Logits without the mask, in float32 or wider. Overwrites the mask's logit in place to save memory."""
    if 0 <= mask_id < logits.shape[-1]:
        logits[..., mask_id] = NEVER
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def score_by_parts(score: Callable[[Tensor], Tensor], vocab_size: int, index: Tensor) -> Tensor:
    """A score of distributions by their index, (k,) -> (k,), computed a few at a time; 0 where the index is -1."""
    read = _places_read(index)
    parts = [score(index[part].clamp(min=0)) for part in torch.split(read, rows_at_once(vocab_size))]
    return _scatter(index, read, torch.cat(parts))


def _places_read(index: Tensor) -> Tensor:
    """The places (n,) of an index (k,) that are not -1; all places during capture, when the host cannot count them."""
    return torch.arange(len(index), device=index.device) if capturing() else (index >= 0).nonzero().squeeze(-1)


def _scatter(index: Tensor, read: Tensor, values: Tensor) -> Tensor:
    """Values (n, ...) at the places `read` (n,) of an index (k,), 0 where the index is -1: (k, ...)."""
    if len(read) == len(index):
        return torch.where((index >= 0).view(-1, *(1,) * (values.dim() - 1)), values, 0)
    return values.new_zeros(len(index), *values.shape[1:]).index_copy(0, read, values)


def rows_at_once(vocab_size: int) -> int:
    """How many whole distributions are computed at once."""
    return max(1, WORKING // (16 * vocab_size))
