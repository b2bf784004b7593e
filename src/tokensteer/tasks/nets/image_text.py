"""An image tower beside frozen vectors of texts: how well an image and a text agree (Radford et al., 2021).

Images have a network of this project, or a linear map of what a published network makes of them; texts have a linear
map of the sentence vectors of a published encoder. Both give vectors of length one, and the agreement is their cosine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokensteer.tasks.nets.image_classifiers import ConvMixer, MixerConfig, ResNet, ResNetConfig
from tokensteer.tasks.nets.parts import check_config

FIRST_SCALE, HIGHEST_SCALE = 14.0, 100.0
"""What cosines are multiplied with in the softmax of training: at first, and at most."""


@dataclass(frozen=True)
class LinearConfig:
    """A linear map of so many features of another network, of which a share `dropout` is left out in training."""

    features: int
    num_classes: int
    dropout: float = 0.5

    def __post_init__(self) -> None:
        check_config(self)


class LinearMap(nn.Module):
    """Numbers (P, num_classes) of features (P, features), each with mean 0 and variance 1."""

    def __init__(self, config: LinearConfig) -> None:
        super().__init__()
        self.config = config
        scaled = nn.BatchNorm1d(config.features, affine=False)
        self.layers = nn.Sequential(scaled, nn.Dropout(config.dropout))
        self.head = nn.Linear(config.features, config.num_classes)

    def numbers(self, features: Tensor) -> Tensor:
        return self.head(self.layers(features)).float()


Body = ResNet | ConvMixer | LinearMap
BodyConfig = ResNetConfig | MixerConfig | LinearConfig
_BODIES: dict[str, tuple[type[BodyConfig], Callable[[Any], Body]]] = {
    "resnet": (ResNetConfig, ResNet),
    "mixer": (MixerConfig, ConvMixer),
    "linear": (LinearConfig, LinearMap),
}


@dataclass(frozen=True)
class ImageTextConfig:
    """The body of a classifier of images, "resnet" or "mixer" with its own configuration, whose classes are the
    numbers of a vector, or "linear" for features of images; and the width of the vectors of texts."""

    kind: str
    body: dict[str, Any]
    text_width: int = 384

    def __post_init__(self) -> None:
        if self.kind not in _BODIES:
            raise ValueError(f"ImageTextConfig.kind must be one of {', '.join(_BODIES)}, got {self.kind!r}")
        check_config(self)

    @property
    def of_body(self) -> BodyConfig:
        return _BODIES[self.kind][0](**self.body)


class ImageText(nn.Module):
    """Cosines (P,) of images (P, 3, side, side) in [0, 1], or of their features, and sentence vectors (P,
    text_width)."""

    def __init__(self, config: ImageTextConfig) -> None:
        super().__init__()
        self.config = config
        body = config.of_body
        self.body = _BODIES[config.kind][1](body)
        self.text = nn.Linear(config.text_width, body.num_classes)
        self.log_scale = nn.Parameter(torch.tensor([math.log(FIRST_SCALE)]))

    @property
    def scale(self) -> Tensor:
        return self.log_scale.exp().clamp(max=HIGHEST_SCALE)

    def of_images(self, images: Tensor) -> Tensor:
        return F.normalize(self.body.numbers(images), dim=-1)

    def of_texts(self, vectors: Tensor) -> Tensor:
        return F.normalize(self.text(vectors).float(), dim=-1)

    def forward(self, images: Tensor, vectors: Tensor) -> Tensor:
        return (self.of_images(images) * self.of_texts(vectors)).sum(-1)


def as_image_text(net: nn.Module) -> ImageText:
    if not isinstance(net, ImageText):
        raise ValueError(f"{type(net).__name__} compares no images with texts: train the reward and the judge again")
    return net
