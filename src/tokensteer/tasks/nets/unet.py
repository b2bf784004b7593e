"""A small convolutional U-Net for grids, with attention at the coarsest level."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokensteer.tasks.nets.parts import Conditioning, check_config, embed
from tokensteer.tasks.nets.transformer import Block


@dataclass(frozen=True)
class UNetConfig:
    """A grid of `height` x `width` sites, row by row, with `channels` at each level of half the size.

    `vocab_size` counts the mask. `timed` networks must be called with t; `num_classes` allows a label.
    """

    vocab_size: int
    height: int
    width: int
    channels: tuple[int, ...] = (32, 64)
    blocks: int = 2
    groups: int = 8
    heads: int = 4
    timed: bool = False
    num_classes: int = 0

    def __post_init__(self) -> None:
        check_config(self, may_be_zero=("num_classes",))
        fold = 2 ** (len(self.channels) - 1)
        if self.height % fold or self.width % fold:
            raise ValueError(
                f"UNetConfig: a grid of {self.height} x {self.width} cannot be halved {len(self.channels) - 1} times: "
                "give fewer channels"
            )
        if any(c % self.groups for c in self.channels) or self.channels[-1] % self.heads:
            raise ValueError(f"UNetConfig: channels {self.channels} must be multiples of groups and heads")


class Residual(nn.Module):
    """Two 3 x 3 convolutions after group norms, with `condition` (P, H) added in between unless H is 0."""

    def __init__(self, channels_in: int, channels: int, groups: int, condition: int) -> None:
        super().__init__()
        self.norm_in, self.norm_out = nn.GroupNorm(groups, channels_in), nn.GroupNorm(groups, channels)
        self.conv_in = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.conv_out = nn.Conv2d(channels, channels, 3, padding=1)
        self.told = nn.Linear(condition, channels) if condition else None
        self.skip = nn.Conv2d(channels_in, channels, 1) if channels_in != channels else nn.Identity()
        nn.init.zeros_(self.conv_out.weight)

    def forward(self, h: Tensor, condition: Tensor | None = None) -> Tensor:
        inner = self.conv_in(F.silu(self.norm_in(h)))
        if self.told is not None and condition is not None:
            inner = inner + self.told(condition)[:, :, None, None]
        return self.skip(h) + self.conv_out(F.silu(self.norm_out(inner)))


class UNet(nn.Module):
    """Logits (P, L, V) of ids (P, L) or one-hots (P, L, V) on a grid, L = height · width: head(hidden(x))."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        first, groups = config.channels[0], config.groups
        condition = first if config.timed or config.num_classes else 0

        def residual(channels_in: int, channels: int) -> Residual:
            return Residual(channels_in, channels, groups, condition)

        self.tokens = nn.Embedding(config.vocab_size, first)
        self.places = nn.Parameter(0.02 * torch.randn(config.height * config.width, first))
        self.conditioning = Conditioning(first, config.timed, config.num_classes)
        down: list[nn.Module] = []
        up: list[nn.Module] = []
        before = first
        for channels in config.channels:
            sizes = [before] + [channels] * config.blocks
            down.append(nn.ModuleList(residual(a, b) for a, b in pairwise(sizes)))
            before = channels
        for channels in reversed(config.channels[:-1]):
            sizes = [before + channels] + [channels] * config.blocks
            up.append(nn.ModuleList(residual(a, b) for a, b in pairwise(sizes)))
            before = channels
        self.down, self.up = nn.ModuleList(down), nn.ModuleList(up)
        self.middle = Block(config.channels[-1], config.heads)
        self.after_middle = residual(config.channels[-1], config.channels[-1])
        self.norm = nn.GroupNorm(groups, first)
        self.head = nn.Linear(first, config.vocab_size)

    def hidden(self, x: Tensor, t: float | Tensor | None = None, label: Tensor | None = None) -> Tensor:
        """(P, L, H)."""
        height, width = self.config.height, self.config.width
        if x.shape[1] != height * width:
            raise ValueError(f"this network was built for a grid of {height} x {width} sites, got {x.shape[1]}")
        condition = self.conditioning(x, t, label)
        h = (embed(x, self.tokens) + self.places).transpose(1, 2).reshape(len(x), -1, height, width)
        skips: list[Tensor] = []
        for level, blocks in enumerate(self.down):
            if level:
                skips.append(h)
                h = F.avg_pool2d(h, 2)
            h = _through(blocks, h, condition)
        coarse = h.shape
        h = self.middle(h.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(coarse)
        h = self.after_middle(h, condition)
        for blocks in self.up:
            h = F.interpolate(h, scale_factor=2.0, mode="nearest")
            h = _through(blocks, torch.cat([h, skips.pop()], 1), condition)
        return F.silu(self.norm(h)).flatten(2).transpose(1, 2)

    def forward(self, x: Tensor, t: float | Tensor | None = None, label: Tensor | None = None) -> Tensor:
        return self.head(self.hidden(x, t, label))


def _through(blocks: nn.Module, h: Tensor, condition: Tensor) -> Tensor:
    for block in blocks.children():
        h = block(h, condition)
    return h
