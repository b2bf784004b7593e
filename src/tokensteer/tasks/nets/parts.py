"""Parts of all networks: checks of configurations, embeddings of ids or one-hots, and of time and class.

Every network takes ids (P, L) or relaxed one-hots (P, L, V). Ids select rows of a table and one-hots are multiplied
with it: the results are equal, and the second is linear in x, so that its gradient has the effect of each token.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar, cast, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokensteer.core.numerics.domains import check_numbers, check_wholes

Net = TypeVar("Net", bound=nn.Module)
NO_LABEL = -1  # the label of a row without one; training drops labels at random to learn both


def check_config(config: object, may_be_zero: tuple[str, ...] = ()) -> None:
    """Check the fields of a configuration by their types: whole numbers and tuples of them are positive, floats lie in
    [0, 1]. Lists, which come from JSON, become tuples."""
    name = type(config).__name__
    for field, kind in get_type_hints(type(config)).items():
        if kind == tuple[int, ...]:
            object.__setattr__(config, field, tuple(getattr(config, field)))
        value: object = getattr(config, field)
        if kind in (int, tuple[int, ...]):
            check_wholes(name, 0 if field in may_be_zero else 1, **{field: value})
        elif kind is float:
            check_numbers(name, "[0, 1]", **{field: value})


def embed(x: Tensor, table: nn.Embedding) -> Tensor:
    """Ids (P, L) or one-hots (P, L, V) to (P, L, H)."""
    return x.to(table.weight.dtype) @ table.weight if x.is_floating_point() else table(x)


def channels_last(net: Net, device: torch.device | str | None = None) -> Net:
    """The network with its convolutions in the layout that is fastest in half precision on a GPU."""
    moved = cast("Any", net).to(memory_format=torch.channels_last)
    return moved if device is None else moved.to(device)


def time_features(t: Tensor, width: int) -> Tensor:
    """Sines and cosines of t (P,), (P, width), of frequencies from 1/2 to 500."""
    rates = math.pi * torch.exp(torch.linspace(0.0, math.log(1000.0), width // 2, device=t.device))
    angles = t.unsqueeze(-1).float() * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


class Conditioning(nn.Module):
    """Time and class as one vector for each row, (P, H); zeros if the network reads neither."""

    def __init__(self, width: int, timed: bool, num_classes: int) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Linear(width - width % 2, width) if timed else None
        self.label = nn.Embedding(num_classes + 1, width) if num_classes else None  # the last row is "no label"

    def forward(self, x: Tensor, t: float | Tensor | None, label: Tensor | None) -> Tensor:
        rows = len(x)
        out = torch.zeros(rows, self.width, device=x.device)
        if self.time is not None:
            if t is None:
                raise ValueError("this network was built with timed=True: call it as network(x, t)")
            times = torch.as_tensor(t, device=x.device).expand(rows)
            out = out + self.time(time_features(times, self.time.in_features))
        if self.label is not None:
            null = self.label.num_embeddings - 1
            given = torch.full((rows,), NO_LABEL, device=x.device) if label is None else label.expand(rows)
            out = out + self.label(torch.where(given == NO_LABEL, null, given))
        elif label is not None:
            raise ValueError("this network knows no classes: build it with num_classes, or leave out the label")
        return F.silu(out)
