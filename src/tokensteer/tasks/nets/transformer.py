"""A small bidirectional transformer for sequences of fixed length.

Positions are learned embeddings, not rotary: on an all-mask canvas, attention that depends on differences of positions
alone would give the same output at every site.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokensteer.tasks.nets.parts import Conditioning, check_config, embed
from tokensteer.train.optim import half_precision


@dataclass(frozen=True)
class TransformerConfig:
    """`vocab_size` counts the mask. `timed` networks must be called with t; `num_classes` allows a label. `tied`
    networks share the embedding table with the head, which saves parameters for a large vocabulary."""

    vocab_size: int
    length: int
    width: int = 64
    depth: int = 4
    heads: int = 4
    timed: bool = False
    num_classes: int = 0
    tied: bool = False

    def __post_init__(self) -> None:
        check_config(self, may_be_zero=("depth", "num_classes"))
        if self.width % self.heads:
            raise ValueError(f"TransformerConfig: width {self.width} is no multiple of {self.heads} heads")


class Block(nn.Module):
    """Full attention, then an MLP, each after a layer norm; `condition` (P, H) is added to the input of attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_mix, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for last in (self.out, self.down):  # a block starts as the identity
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, h: Tensor, condition: Tensor | None = None) -> Tensor:
        rows, length, width = h.shape
        seen = self.before_mix(h if condition is None else h + condition.unsqueeze(1))
        q, k, v = self.qkv(seen).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, width)
        h = h + self.out(mixed)
        return h + self.down(F.silu(self.up(self.before_mlp(h))))


class Transformer(nn.Module):
    """Logits (P, L, V) of ids (P, L) or one-hots (P, L, V): head(hidden(x)); a caller may apply it at some sites."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.places = nn.Parameter(0.02 * torch.randn(config.length, config.width))
        self.conditioning = Conditioning(config.width, config.timed, config.num_classes)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size)
        if config.tied:
            nn.init.normal_(self.tokens.weight, std=0.02)  # logits start near 0
            self.head.weight = self.tokens.weight

    def hidden(self, x: Tensor, t: float | Tensor | None = None, label: Tensor | None = None) -> Tensor:
        """(P, L, H)."""
        return self.within(embed(x, self.tokens), t, label)

    def within(self, embedded: Tensor, t: float | Tensor | None = None, label: Tensor | None = None) -> Tensor:
        """Hidden states of embedded tokens (P, L, H)."""
        if embedded.shape[1] != self.config.length:
            raise ValueError(f"this transformer was built for length {self.config.length}, got {embedded.shape[1]}")
        condition = self.conditioning(embedded, t, label)
        h = embedded + self.places
        for block in self.blocks:
            h = block(h, condition)
        return self.norm(h)

    def forward(self, x: Tensor, t: float | Tensor | None = None, label: Tensor | None = None) -> Tensor:
        return self.head(self.hidden(x, t, label))


class Trunk(nn.Module):
    """A transformer without time and without its head: hidden states (P, L, H) of ids, one-hots or embeddings, which
    make gradients over a large vocabulary cheap (`core.models.denoiser.Embedded`). A context is the label. On a GPU
    the blocks run in half precision."""

    def __init__(self, net: Transformer) -> None:
        super().__init__()
        self.net = net

    @property
    def embedding(self) -> Tensor:
        return self.net.tokens.weight

    def of_embeddings(self, embedded: Tensor, *context: Tensor) -> Tensor:
        with half_precision(embedded.device):
            return self.net.within(embedded, None, *context).float()

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        with half_precision(x.device):
            return self.net.hidden(x, None, *context).float()
