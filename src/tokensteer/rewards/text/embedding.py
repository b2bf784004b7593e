"""Helpers to call networks of `transformers` with embedded tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def table_of(network: Any) -> Tensor:
    """The embedding of each token, (rows, d), computed by the network, since some scale their weights."""
    embed = network.get_input_embeddings()
    return embed(torch.arange(embed.weight.shape[0], device=embed.weight.device)).detach()


def resized(table: Tensor, vocab_size: int) -> Tensor:
    """The table for a canvas of `vocab_size` tokens. Rows that the network lacks, such as the mask, are zero: clean
    sequences have no such tokens."""
    missing = vocab_size - len(table)
    return table[:vocab_size] if missing <= 0 else torch.cat([table, table.new_zeros(missing, table.shape[1])])


def embed(x: Tensor, table: Tensor) -> Tensor:
    """Ids (P, L) or one-hots (P, L, V) to (P, L, d)."""
    return x.to(table.dtype) @ table if x.is_floating_point() else table[x]


def is_text(x: Tensor, silent: Sequence[int]) -> Tensor:
    """Where ids (P, L) or one-hots (P, L, V) hold none of the `silent` tokens, (P, L)."""
    ids = x.argmax(-1) if x.is_floating_point() else x
    real = torch.ones_like(ids, dtype=torch.bool)
    for k in silent:
        real = real & (ids != k)
    return real


def check_length(canvas: int, special: int, longest: int) -> None:
    if canvas + special > longest:
        raise ValueError(
            f"a canvas of {canvas} tokens is {canvas + special} with special tokens, and the network reads {longest} "
            "at most: use a shorter canvas"
        )


def padding_last(real: Tensor) -> Tensor:
    """The order (P, L) that moves sites that are not `real` (P, L) to the end and keeps the order otherwise."""
    return (~real).byte().argsort(dim=-1, stable=True)


def reorder(x: Tensor, order: Tensor) -> Tensor:
    """x (P, L) or (P, L, d) with its sites in the given order (P, L)."""
    return x.gather(1, order if x.dim() == 2 else order.unsqueeze(-1).expand_as(x))
