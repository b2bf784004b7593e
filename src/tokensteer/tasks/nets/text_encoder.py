"""BERT's encoder for texts of different lengths: the states of their tokens, which other networks are conditioned on.

The states of a published encoder are frozen. Padding has the id -1; nothing attends to it and its states are zero, so
that a text without tokens, which stands for no text, is zero everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tokensteer.tasks.nets.encoder import EPSILON, Layer
from tokensteer.tasks.nets.parts import check_config

PADDING = -1


@dataclass(frozen=True)
class TextEncoderConfig:
    """`depth` layers of BERT for texts of at most `length` tokens, the first and last of which frame the text."""

    vocab_size: int
    length: int
    width: int = 384
    depth: int = 6
    heads: int = 12
    inner: int = 1536

    def __post_init__(self) -> None:
        check_config(self, may_be_zero=("depth",))
        if self.width % self.heads:
            raise ValueError(f"TextEncoderConfig: width {self.width} is no multiple of {self.heads} heads")


class TextEncoder(nn.Module):
    """The last hidden states (P, S, width) of ids (P, S)."""

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.places = nn.Parameter(0.02 * torch.randn(config.length, config.width))
        self.enter = nn.LayerNorm(config.width, EPSILON)
        self.layers = nn.ModuleList(Layer(config.width, config.heads, config.inner) for _ in range(config.depth))
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.shape[1] > self.config.length:
            raise ValueError(f"this encoder was built for {self.config.length} tokens, got {ids.shape[1]}")
        present = ids != PADDING
        # A text without tokens attends to itself, since a softmax over nothing is no number.
        seen = (present | ~present.any(1, keepdim=True))[:, None, None, :]
        h = self.enter(self.tokens(ids.clamp(min=0)) + self.places[: ids.shape[1]])
        for layer in self.layers:
            h = layer(h, seen)
        return torch.where(present.unsqueeze(-1), h, 0.0)


def sentence_vectors(states: Tensor) -> Tensor:
    """The mean state of each text, of length one, (P, width); zero for a text without tokens."""
    present = (states != 0).any(-1, keepdim=True)
    mean = (states.float() * present).sum(1) / present.sum(1).clamp(min=1)
    return nn.functional.normalize(mean, dim=-1)
