"""Classifiers of sequences that also take embeddings, and one of detectors of n-grams, which judges samples.

They take ids (P, L), one-hots (P, L, V) or, in `of_embeddings`, embeddings (P, L, d) of their own table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokensteer.tasks.nets.parts import check_config, embed


class Reader(nn.Module, ABC):
    """A classifier that also takes embeddings."""

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
class NgramConfig:
    """Convolutions over `spans` of tokens, with `channels` each."""

    vocab_size: int
    num_classes: int
    features: int = 64
    spans: tuple[int, ...] = (1, 2, 3, 5)
    channels: int = 96

    def __post_init__(self) -> None:
        check_config(self)


class NgramReader(Reader):
    """Log-probabilities of the classes, (P, K), from the maximum and the mean over sites of detectors of n-grams,
    without attention or positions."""

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
