"""Random networks of the classes of `cifar`, with random images and features, for `--tiny`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn

from tests.helpers import small_cifar
from tokensteer.tasks.cifar.data import CLASSES, Data, Images
from tokensteer.tasks.cifar.model import Networks

SIDE = 8


def networks() -> Networks:
    return small_cifar.networks(SIDE)


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
