"""Two classifiers of sequences, unlike each other on purpose: one gives the reward, the other judges what it led to.

Both take ids (P, L), one-hots (P, L, V) or, by `of_embeddings`, what their own table makes of tokens (P, L, d).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokensteer.core.numerics.domains import check_wholes
from tokensteer.tasks.nets.parts import embed
from tokensteer.tasks.nets.transformer import Block


class _Reader(nn.Module, ABC):
    """A classifier that can be entered behind its table of tokens."""

    def __init__(self, vocab_size: int, features: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, features)
        nn.init.normal_(self.tokens.weight, std=0.1)

    @property
    def embedding(self) -> Tensor:
        return self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.of_embeddings(embed(x, self.tokens))

    @abstractmethod
    def of_embeddings(self, embedded: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class AttentiveConfig:
    """A transformer over tokens; `features` is the width of its table, which is most of it."""

    vocab_size: int
    length: int
    num_classes: int
    features: int = 48
    width: int = 96
    depth: int = 3
    heads: int = 3

    def __post_init__(self) -> None:
        check_wholes("AttentiveConfig", 1, **{name: value for name, value in vars(self).items() if name != "depth"})
        check_wholes("AttentiveConfig", 0, depth=self.depth)
        if self.width % self.heads:
            raise ValueError(f"AttentiveConfig: width {self.width} is no multiple of {self.heads} heads")


class AttentiveReader(_Reader):
    """Log-probabilities of the classes, (P, K), from the mean of all sites after attention of all to all."""

    def __init__(self, config: AttentiveConfig) -> None:
        super().__init__(config.vocab_size, config.features)
        self.config = config
        self.enter = nn.Linear(config.features, config.width)
        self.places = nn.Parameter(0.02 * torch.randn(config.length, config.width))
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.num_classes)

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        if embedded.shape[1] != self.config.length:
            raise ValueError(f"this classifier was built for length {self.config.length}, got {embedded.shape[1]}")
        h = self.enter(embedded) + self.places
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h).mean(1)).log_softmax(-1)


@dataclass(frozen=True)
class NgramConfig:
    """Convolutions over so many tokens each, `spans`, with `channels` of each."""

    vocab_size: int
    num_classes: int
    features: int = 64
    spans: tuple[int, ...] = (1, 2, 3, 5)
    channels: int = 96

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", tuple(self.spans))  # JSON knows lists only
        sizes = {"vocab_size": self.vocab_size, "num_classes": self.num_classes, "channels": self.channels}
        check_wholes("NgramConfig", 1, **sizes, features=self.features)
        check_wholes("NgramConfig", 1, spans=self.spans)


class NgramReader(_Reader):
    """Log-probabilities of the classes, (P, K), from the strongest and the mean answer of each detector of n-grams,
    wherever it stands; it has no attention and knows no places."""

    def __init__(self, config: NgramConfig) -> None:
        super().__init__(config.vocab_size, config.features)
        self.config = config
        self.detectors = nn.ModuleList(nn.Conv1d(config.features, config.channels, span) for span in config.spans)
        found = 2 * len(config.spans) * config.channels
        self.norm = nn.LayerNorm(found)
        self.head = nn.Linear(found, config.num_classes)

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        h = embedded.transpose(1, 2)
        answers = [F.silu(detector(h)) for detector in self.detectors]
        found = torch.cat([summary for h in answers for summary in (h.amax(-1), h.mean(-1))], -1)
        return self.head(self.norm(found)).log_softmax(-1)
