"""Networks over grids of image tokens, as networks over sequences with a context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from tokensteer.adapters.network import embedding_replaced, table_of
from tokensteer.core.models.denoiser import Time
from tokensteer.core.numerics.draws import NEVER

Codes = Callable[..., Tensor]
"""Logits (P, h·w, K) over the K codes of ids (P, h, w), the time unless it is ignored, and rows of context."""


class GridNetwork(Protocol):
    """A network over the codes of a grid, in the order of rows. `given` is the time, unless it is ignored, and the rows
    of context."""

    @property
    def grid(self) -> tuple[int, int]: ...
    @property
    def length(self) -> int: ...
    def __call__(self, x: Tensor, *given: Time) -> Tensor:
        """Logits over all ids (P, h·w, V) of ids (P, h·w) or one-hots (P, h·w, V)."""
        ...

    def codes(self, x: Tensor, *given: Time) -> Tensor:
        """Logits over the codes alone, (P, h·w, K)."""
        ...

    def widened(self, codes: Tensor) -> Tensor:
        """Logits over all ids: -inf at those that are no codes."""
        ...


class TokenGrid(nn.Module):
    """Logits (P, h·w, V) of ids (P, h·w) or one-hots (P, h·w, V), in the order of rows, and rows of context,
    with the time before them unless it is ignored.

    `call` is the network `net` on grids. It may have fewer columns than there are ids, as the mask and spare ids are
    never generated: those behind its last column are -inf. One-hots, for gradients, need `layer`, the network's table
    of token embeddings.
    """

    def __init__(
        self, net: nn.Module, call: Codes, grid: tuple[int, int], vocab_size: int, layer: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.net, self.layer, self.call, self.vocab_size = net, layer, call, vocab_size
        self.size = grid

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.size

    @property
    def length(self) -> int:
        return self.grid[0] * self.grid[1]

    def forward(self, x: Tensor, *given: Time) -> Tensor:
        return self.widened(self.codes(x, *given))

    def codes(self, x: Tensor, *given: Time) -> Tensor:
        """Logits over the codes alone, (P, h·w, K)."""
        if x.shape[1] != self.length:
            height, width = self.grid
            raise ValueError(f"x has {x.shape[1]} sites, and a grid of {height} × {width} has {self.length}")
        if not x.is_floating_point():
            return self._called(x, given)
        if self.layer is None:
            raise ValueError(
                f"one-hots, for gradients, need the layer of {type(self.net).__name__} that embeds its tokens: name it "
                "as layer=..., or use a proposal without gradients"
            )
        table = table_of(self.layer)
        with embedding_replaced(self.net, self.layer, x.to(table.dtype) @ table):
            return self._called(x.argmax(-1), given)

    def widened(self, codes: Tensor) -> Tensor:
        """Logits over all ids: -inf at those that are no codes."""
        return torch.nn.functional.pad(codes, (0, self.vocab_size - codes.shape[-1]), value=NEVER)

    def _called(self, ids: Tensor, given: tuple[Time, ...]) -> Tensor:
        logits = self.call(ids.unflatten(-1, self.grid), *given)
        if logits.shape[:2] != ids.shape or logits.shape[-1] > self.vocab_size:
            raise ValueError(
                f"{type(self.net).__name__} returns {tuple(logits.shape)} for {len(ids)} grids of {self.length} sites "
                f"and {self.vocab_size} ids: expected ({len(ids)}, {self.length}, K) with K <= {self.vocab_size}"
            )
        return logits
