"""Networks over grids of image tokens, as networks over sequences with a context."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tokensteer.adapters.network import embedding_replaced, table_of
from tokensteer.core.numerics.draws import NEVER

Codes = Callable[..., Tensor]
"""Logits (P, h·w, K) over the K codes of ids (P, h, w) and rows of context, (P, ...) each."""


class TokenGrid(nn.Module):
    """Logits (P, h·w, V) of ids (P, h·w) or one-hots (P, h·w, V), in the order of rows, and rows of context.

    `call` is the network `net` on grids. It may have fewer columns than there are ids, as the mask and spare ids are
    never generated: those behind its last column are -inf. One-hots, for gradients, need `layer`, the network's table
    of token embeddings.
    """

    def __init__(
        self, net: nn.Module, call: Codes, grid: tuple[int, int], vocab_size: int, layer: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.net, self.layer, self.call, self.grid, self.vocab_size = net, layer, call, grid, vocab_size

    @property
    def length(self) -> int:
        return self.grid[0] * self.grid[1]

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        return self.widened(self.codes(x, *context))

    def codes(self, x: Tensor, *context: Tensor) -> Tensor:
        """Logits over the codes alone, (P, h·w, K)."""
        if x.shape[1] != self.length:
            height, width = self.grid
            raise ValueError(f"x has {x.shape[1]} sites, and a grid of {height} × {width} has {self.length}")
        if not x.is_floating_point():
            return self._called(x, context)
        if self.layer is None:
            raise ValueError(
                f"one-hots, for gradients, need the layer of {type(self.net).__name__} that embeds its tokens: name it "
                "as layer=..., or use a proposal without gradients"
            )
        table = table_of(self.layer)
        with embedding_replaced(self.net, self.layer, x.to(table.dtype) @ table):
            return self._called(x.argmax(-1), context)

    def widened(self, codes: Tensor) -> Tensor:
        """Logits over all ids: -inf at those that are no codes."""
        return torch.nn.functional.pad(codes, (0, self.vocab_size - codes.shape[-1]), value=NEVER)

    def _called(self, ids: Tensor, context: tuple[Tensor, ...]) -> Tensor:
        logits = self.call(ids.unflatten(-1, self.grid), *context)
        if logits.shape[:2] != ids.shape or logits.shape[-1] > self.vocab_size:
            raise ValueError(
                f"{type(self.net).__name__} returns {tuple(logits.shape)} for {len(ids)} grids of {self.length} sites "
                f"and {self.vocab_size} ids: expected ({len(ids)}, {self.length}, K) with K <= {self.vocab_size}"
            )
        return logits
