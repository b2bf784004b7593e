"""What the networks share: embeddings of ids or one-hots, and of time and class.

Every network takes ids (P, L) or relaxed one-hots (P, L, V). Ids look up rows of a table, one-hots are multiplied with
it: the same answer, and the second is linear in x, so that a gradient says what each token is worth.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NO_LABEL = -1
"""The label of a row that has none; training drops labels to it, so that the network also learns to do without."""


def embed(x: Tensor, table: nn.Embedding) -> Tensor:
    """Ids (P, L) or one-hots (P, L, V) to (P, L, H)."""
    return x.to(table.weight.dtype) @ table.weight if x.is_floating_point() else table(x)


def time_features(t: Tensor, width: int) -> Tensor:
    """Sines and cosines of t (P,), (P, width), from once to some thousand times over [0, 1]."""
    rates = math.pi * torch.exp(torch.linspace(0.0, math.log(1000.0), width // 2, device=t.device))
    angles = t.unsqueeze(-1).float() * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


class Conditioning(nn.Module):
    """Time and class as one vector for each row, (P, H); zeros where the network is told neither."""

    def __init__(self, width: int, timed: bool, num_classes: int) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Linear(width - width % 2, width) if timed else None
        self.label = nn.Embedding(num_classes + 1, width) if num_classes else None  # the last row is "no label"

    def forward(self, x: Tensor, t: float | Tensor | None, label: Tensor | None) -> Tensor:
        rows = len(x)
        told = torch.zeros(rows, self.width, device=x.device)
        if self.time is not None:
            if t is None:
                raise ValueError("this network was built with timed=True: call it as network(x, t)")
            times = torch.as_tensor(t, device=x.device).expand(rows)
            told = told + self.time(time_features(times, self.time.in_features))
        if self.label is not None:
            null = self.label.num_embeddings - 1
            given = torch.full((rows,), NO_LABEL, device=x.device) if label is None else label.expand(rows)
            told = told + self.label(torch.where(given == NO_LABEL, null, given))
        elif label is not None:
            raise ValueError("this network knows no classes: build it with num_classes, or leave out the label")
        return F.silu(told)
