"""Denoisers and rewards as random tables over all states, so that a call is one look-up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

import tokensteer as ts

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda a: a.contiguous(),
    "turned": lambda a: a.mT.contiguous().mT,
    "gaps": lambda a: pad(a, (0, 3))[..., :-3],
    "apart": lambda a: a.transpose(0, 1).contiguous().transpose(0, 1),
}  # of the memory that a network returns its answer in


def contracted(table: Tensor, one_hots: Tensor) -> Tensor:
    """A table (S, ...) over all states, extended multilinearly to one-hots (P, L, V): (P, ...)."""
    rows, length, vocab_size = one_hots.shape
    left = (
        table.to(one_hots.dtype)
        .view(1, *[vocab_size] * length, *table.shape[1:])
        .expand(rows, *[-1] * (length + table.dim() - 1))
    )
    for site in range(length):
        left = (left * one_hots[:, site].view(rows, vocab_size, *[1] * (left.dim() - 2))).sum(1)
    return left


@dataclass(frozen=True)
class TableNet:
    """p(x_0 | x_t) as a table (C, S, L, V) over contexts and states. With `timely` it depends on the time as well;
    `layout` is one of `LAYOUTS`."""

    table: Tensor
    mask_id: int
    timely: bool = False
    layout: str = "whole"

    @property
    def ignores_time(self) -> bool:
        return not self.timely

    @property
    def vocab_size(self) -> int:
        return self.table.shape[-1]

    @cached_property
    def _places(self) -> Tensor:
        """What each site of ids (P, L) adds to the number of their state."""
        return self.vocab_size ** torch.arange(self.table.shape[-2] - 1, -1, -1)

    @cached_property
    def _log_table(self) -> Tensor:
        return self.table.log().log_softmax(-1)

    def __call__(self, x: Tensor, t: Any = 0.5, label: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        if x.is_floating_point():
            each = torch.stack([contracted(part, x) for part in self.table])
            row = torch.arange(len(x))
            masses = each[label if label is not None else torch.zeros_like(row), row]
        else:
            at = 0 if label is None else label, (x * self._places).sum(-1)
            if not self.timely and shift is None:
                return LAYOUTS[self.layout](self._log_table[at])
            masses = self.table[at]
        possible = masses > 0  # log 0 stays out of the graph: its gradient is NaN
        log_p = torch.where(possible, masses, 1.0).log()
        if self.timely:
            log_p = log_p * (0.3 + torch.as_tensor(t, dtype=log_p.dtype).view(-1, 1, 1))
        if shift is not None:
            log_p = log_p * (1.0 + shift.view(-1, 1, 1))
        return LAYOUTS[self.layout](log_p.masked_fill(~possible, -math.inf).log_softmax(-1))

    def in_form(self, form: str) -> ts.Denoiser:
        """Log-probabilities; or logits, neither normalised nor without the mask; or hidden states and a head that only
        permutes them, so that its sums are the same for any number of rows."""
        is_mask = torch.arange(self.vocab_size) == self.mask_id

        def logits(x: Tensor, *rest: Any) -> Tensor:
            log_p = self(x, *rest) if self.timely else self(x, 0.5, *rest)
            return LAYOUTS[self.layout](log_p.masked_fill(is_mask, 1.0) + 0.5)

        def hidden(x: Tensor, *rest: Any) -> Tensor:
            kept = logits(x, *rest).clamp(min=-1e4)  # exp(-1e4) is 0, and leaves no NaN in a product
            return LAYOUTS[self.layout](-kept.roll(-1, -1))

        match form:
            case "logits":
                return ts.from_logits(logits, self.mask_id, ignores_time=not self.timely)
            case "hidden":
                return ts.from_hidden(hidden, self.head(), self.mask_id, ignores_time=not self.timely)
        return self

    def head(self, scale: float = 1.0) -> nn.Linear:
        """The head of the hidden form; with a `scale` below 1, that of a flatter distribution."""
        size = self.vocab_size
        head = nn.Linear(size, size, bias=False, dtype=self.table.dtype).requires_grad_(False)
        head.weight.copy_(-scale * torch.eye(size, dtype=self.table.dtype).roll(1, 0))
        return head


def random_table(noise: Tensor, zero: Tensor, mask_id: int, barred: Sequence[int] = ()) -> Tensor:
    """Distributions over tokens from `noise` (..., V), 0 where `zero` unless nothing would be left."""
    masses = noise + 0.05
    closed = torch.zeros(masses.shape[-1], dtype=torch.bool)
    closed[[*barred, *([mask_id] if mask_id != ts.NO_MASK else [])]] = True
    masses = masses.masked_fill(closed, 0.0)
    fewer = masses.masked_fill(zero, 0.0)
    masses = torch.where(fewer.sum(-1, keepdim=True) > 0, fewer, masses)
    return masses / masses.sum(-1, keepdim=True)


@dataclass
class TableReward:
    """Rewards (V,) * L of all sequences, exact in any dtype; of one-hots too. It may answer in memory of its own."""

    worth: Tensor
    dtype: torch.dtype
    reuses: bool = False
    memory: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            return contracted(self.worth.flatten(), x).to(self.dtype)
        found = self.worth[tuple(x.unbind(-1))].to(self.dtype)
        if not self.reuses:
            return found
        if self.memory is None or len(self.memory) < len(found) or self.memory.dtype != self.dtype:
            self.memory = torch.empty(max(64, len(found)), dtype=self.dtype)
        return self.memory[: len(found)].copy_(found)

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Within it, rewards are float64 in new memory."""
        kept = self.dtype, self.reuses
        self.dtype, self.reuses = torch.float64, False
        try:
            yield
        finally:
            self.dtype, self.reuses = kept


def value(x: Tensor, t: float) -> Tensor:
    """An estimate of any reward, of ids or one-hots: how often id 0 is there."""
    return (x[..., 0] if x.is_floating_point() else (x == 0).double()).sum(-1)
