"""Low-rank matrices beside those of a block (Hu et al., 2022), which a proposal learns in place of the whole block."""

from __future__ import annotations

from torch import Tensor, nn


class LowRank(nn.Module):
    """B·A·x, zero before training."""

    def __init__(self, before: int, after: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(before, rank, bias=False), nn.Linear(rank, after, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, h: Tensor) -> Tensor:
        return self.up(self.down(h))


class BlockAdapter(nn.Module):
    """What is added to the four matrices of a block."""

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.qkv, self.out = LowRank(hidden, 3 * hidden, rank), LowRank(hidden, hidden, rank)
        self.up, self.down = LowRank(hidden, 4 * hidden, rank), LowRank(4 * hidden, hidden, rank)


def added(layer: nn.Linear, h: Tensor, low_rank: LowRank | None) -> Tensor:
    """The layer at h, with what was learned beside it."""
    return layer(h) if low_rank is None else layer(h) + low_rank(h)
