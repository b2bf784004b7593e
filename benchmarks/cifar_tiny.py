"""Random networks of the classes of `cifar`, with random images and features, for `--tiny`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

from tokensteer.tasks import nets
from tokensteer.tasks.cifar.data import CLASSES, Data, Images
from tokensteer.tasks.cifar.model import Networks
from tokensteer.tasks.nets.store import build

SIDE = 8


def networks() -> Networks:
    torch.manual_seed(0)
    denoiser = build(nets.GridTransformerConfig(10, 4, 4, hidden=16, depth=1, heads=2, num_classes=len(CLASSES)))
    for name, weight in denoiser.named_parameters():
        if "modulation" in name or name == "tokens.weight":  # before training classes do not differ
            nn.init.normal_(weight)
    tokeniser = build(nets.FSQConfig(SIDE, (3, 3), (8, 8), (1, 1), (8, 8), (1, 1)))
    classifiers = (build(nets.ResNetConfig(SIDE, 10, (8, 16), 1)), build(nets.MixerConfig(SIDE, 10, 16, 2, 3)))
    made = [net.eval().requires_grad_(False) for net in (tokeniser, denoiser, *classifiers)]
    return Networks(*cast("Any", made))


def data() -> Data:
    draw = Generator().manual_seed(1)

    def images(count: int) -> Images:
        pixels = torch.randint(256, (count, 3, SIDE, SIDE), generator=draw, dtype=torch.uint8)
        return Images(pixels, torch.arange(count) % len(CLASSES))

    return Data(images(60), images(40))


def features() -> Callable[[Tensor], Tensor]:
    torch.manual_seed(2)
    extractor = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.Tanh(), nn.Flatten()).requires_grad_(False)
    return lambda pixels: extractor(pixels.float() / 255)
