"""Small random networks in double precision that take embeddings, and kernels for a vocabulary of four."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import tokensteer as ts

KERNELS = {
    "mdm": ts.Ancestral(3),
    "remdm": ts.Ancestral(3, sigma=ts.Cap(0.2)),
    "lowconf": ts.Ranked(3, count=lambda step, masked: (step.index % 2 == 0) + 0 * masked),
    "entropy": ts.Ranked(3, confidence=ts.ranked.negative_entropy),
    "cursors": ts.LeftToRight(3),
    "jumps": ts.FirstHitting(3),
    "maskgit": ts.MaskGIT(3),
}


class Entered(nn.Module):
    """A small random network that can be entered behind its embedding: logits, or one number for each sequence."""

    def __init__(self, outputs: int, vocab: int = 4, width: int = 5, length: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(outputs)
            self.table = nn.Parameter(torch.randn(vocab, width, dtype=torch.float64))
            self.mix = nn.Linear(width * length, width * length, dtype=torch.float64)
            self.head = nn.Linear(width, outputs, dtype=torch.float64)

    @property
    def embedding(self) -> Tensor:
        return self.table

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        return self.mix(embedded.flatten(1)).view_as(embedded).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.of_embeddings(x @ self.table if x.is_floating_point() else self.table[x])


class Logit(Entered):
    def of_embeddings(self, embedded: Tensor) -> Tensor:
        return self.head(super().of_embeddings(embedded))


class Valued(Entered):
    def of_embeddings(self, embedded: Tensor) -> Tensor:
        return self.head(super().of_embeddings(embedded)).sum((-1, -2))
