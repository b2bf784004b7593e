"""Two classifiers of colour images of different architecture: one is a reward, the other judges what it steers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokensteer.tasks.nets.parts import check_config


@dataclass(frozen=True)
class ResNetConfig:
    """Residual blocks on images of `side` x `side` pixels, with `channels` at each level of half the size."""

    side: int
    num_classes: int
    channels: tuple[int, ...] = (64, 128, 224)
    blocks: int = 2

    def __post_init__(self) -> None:
        check_config(self)
        _check_side(self.side, 2 ** (len(self.channels) - 1))


@dataclass(frozen=True)
class MixerConfig:
    """Patches of `patch` x `patch` pixels, mixed in turn across sites, by one filter for each channel, and across
    channels."""

    side: int
    num_classes: int
    hidden: int = 256
    depth: int = 10
    kernel: int = 5
    patch: int = 2

    def __post_init__(self) -> None:
        check_config(self)
        _check_side(self.side, self.patch)


def _check_side(side: int, parts: int) -> None:
    if side % parts:
        raise ValueError(f"images of {side} pixels cannot be divided by {parts}: give another side")


def _convolved(into: int, out: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    layer = nn.Conv2d(into, out, kernel, stride, kernel // 2, bias=False)
    return [layer, nn.BatchNorm2d(out)]


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*_convolved(into, out, 3, stride), nn.ReLU(), *_convolved(out, out, 3))
        same = into == out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolved(into, out, 1, stride))

    def forward(self, h: Tensor) -> Tensor:
        return F.relu(self.shortcut(h) + self.layers(h))


class ResNet(nn.Module):
    """Log-probabilities of the classes, (P, K), of images (P, 3, side, side) in [0, 1] (He et al., 2016)."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        before = config.channels[0]
        layers: list[nn.Module] = [*_convolved(3, before, 3), nn.ReLU()]
        for level, channels in enumerate(config.channels):
            for block in range(config.blocks):
                layers.append(ResidualBlock(before, channels, 2 if level and not block else 1))
                before = channels
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(before, config.num_classes)

    def numbers(self, images: Tensor) -> Tensor:
        """The outputs of the head, (P, K)."""
        return self.head(self.layers(_centred(images, self.config.side)).mean((2, 3))).float()

    def forward(self, images: Tensor) -> Tensor:
        return self.numbers(images).log_softmax(-1)


class MixerBlock(nn.Module):
    def __init__(self, hidden: int, kernel: int) -> None:
        super().__init__()
        self.across_sites = nn.Sequential(
            nn.Conv2d(hidden, hidden, kernel, padding=kernel // 2, groups=hidden), nn.GELU(), nn.BatchNorm2d(hidden)
        )
        self.across_channels = nn.Sequential(nn.Conv2d(hidden, hidden, 1), nn.GELU(), nn.BatchNorm2d(hidden))

    def forward(self, h: Tensor) -> Tensor:
        return self.across_channels(h + self.across_sites(h))


class ConvMixer(nn.Module):
    """Log-probabilities of the classes, (P, K), of images (P, 3, side, side) in [0, 1] (Trockman and Kolter, 2022)."""

    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        self.config = config
        patches = nn.Conv2d(3, config.hidden, config.patch, config.patch)
        blocks: Sequence[nn.Module] = [MixerBlock(config.hidden, config.kernel) for _ in range(config.depth)]
        self.layers = nn.Sequential(patches, nn.GELU(), nn.BatchNorm2d(config.hidden), *blocks)
        self.head = nn.Linear(config.hidden, config.num_classes)

    def numbers(self, images: Tensor) -> Tensor:
        """The outputs of the head, (P, K)."""
        return self.head(self.layers(_centred(images, self.config.side)).mean((2, 3))).float()

    def forward(self, images: Tensor) -> Tensor:
        return self.numbers(images).log_softmax(-1)


def _centred(images: Tensor, side: int) -> Tensor:
    """About zero mean and unit variance, as natural images have it."""
    if images.shape[1:] != (3, side, side) or images.dtype == torch.uint8:
        raise ValueError(
            f"this classifier was built for images (P, 3, {side}, {side}) from 0 to 1, got {images.dtype} of shape "
            f"{tuple(images.shape)}"
        )
    return 4 * images - 1.9
