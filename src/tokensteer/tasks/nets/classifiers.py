"""Two classifiers of grids of different architecture: one is the reward, the other judges its samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokensteer.tasks.nets.parts import check_config, embed
from tokensteer.tasks.nets.transformer import Block


@dataclass(frozen=True)
class ConvConfig:
    """Convolutions on a grid of `height` x `width` sites, with `channels` at each level of half the size."""

    vocab_size: int
    height: int
    width: int
    num_classes: int
    channels: tuple[int, ...] = (32, 64)
    groups: int = 8

    def __post_init__(self) -> None:
        check_config(self)


class ConvClassifier(nn.Module):
    """Log-probabilities of the classes, (P, K), of ids (P, L) or one-hots (P, L, V)."""

    def __init__(self, config: ConvConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.channels[0])
        levels: list[nn.Module] = []
        before = config.channels[0]
        for channels in config.channels:
            layers = [nn.Conv2d(before, channels, 3, padding=1), nn.GroupNorm(config.groups, channels), nn.SiLU()]
            layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(config.groups, channels), nn.SiLU()]
            levels.append(nn.Sequential(*layers, nn.AvgPool2d(2)))
            before = channels
        self.levels = nn.Sequential(*levels)
        halvings = len(config.channels)
        self.head = nn.Linear(before * (config.height >> halvings) * (config.width >> halvings), config.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        h = embed(x, self.tokens).transpose(1, 2).reshape(len(x), -1, self.config.height, self.config.width)
        return self.head(self.levels(h).flatten(1)).log_softmax(-1)


@dataclass(frozen=True)
class PatchConfig:
    """A transformer over patches of `patch` x `patch` sites of a grid."""

    vocab_size: int
    height: int
    width: int
    num_classes: int
    patch: int = 4
    features: int = 4
    hidden: int = 64
    depth: int = 4
    heads: int = 4

    def __post_init__(self) -> None:
        check_config(self, may_be_zero=("depth",))
        if self.height % self.patch or self.width % self.patch:
            raise ValueError(f"PatchConfig: {self.height} x {self.width} is not made of patches of {self.patch}")


class PatchClassifier(nn.Module):
    """Log-probabilities of the classes, (P, K), of ids (P, L) or one-hots (P, L, V), without convolutions."""

    def __init__(self, config: PatchConfig) -> None:
        super().__init__()
        self.config = config
        count = (config.height // config.patch) * (config.width // config.patch)
        self.tokens = nn.Embedding(config.vocab_size, config.features)
        self.patches = nn.Linear(config.features * config.patch**2, config.hidden)
        self.places = nn.Parameter(0.02 * torch.randn(count, config.hidden))
        self.blocks = nn.Sequential(*(Block(config.hidden, config.heads) for _ in range(config.depth)))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        grid = embed(x, self.tokens).transpose(1, 2).reshape(len(x), -1, self.config.height, self.config.width)
        patches = F.unfold(grid, self.config.patch, stride=self.config.patch).transpose(1, 2)
        h = self.blocks(self.patches(patches) + self.places)
        return self.head(self.norm(h).mean(1)).log_softmax(-1)
