"""Scores of images by their pixels alone: how much has a colour, and how well an image can be compressed."""

from __future__ import annotations

import zlib
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from tokensteer.rewards.image.decoded import Score

HUES = {
    "red": (0.9, 0.1, 0.15),
    "orange": (1.0, 0.55, 0.0),
    "yellow": (1.0, 0.9, 0.1),
    "green": (0.2, 0.75, 0.25),
    "blue": (0.1, 0.4, 0.95),
    "purple": (0.55, 0.25, 0.85),
    "pink": (1.0, 0.4, 0.7),
}
"""Colours by name, as RGB. Black, white and grey have no hue."""
_SAME_HUE = 0.87  # the cosine of thirty degrees
_SOFTNESS = 0.05  # of the soft boundary, in cosines
_FAINT = 0.1  # chroma below which a pixel has hardly a colour
_PAPER = 0.05  # the ink of a pixel that is still paper
_LEAST = 0.02  # the share of an image that counts as ink in any case, so that a blank one has no colour


def compressibility(images: Tensor) -> Tensor:
    """Minus the kilobytes of each image as the pixels of a PNG: differences from the pixel to the left, deflated. It
    has no gradient."""
    pixels = (255 * images.detach()).round().to(torch.uint8)
    before = F.pad(pixels, (1, 0))[..., :-1]
    lines = cast("Any", (pixels - before).permute(0, 2, 3, 1).contiguous().cpu()).numpy()
    sizes = [len(zlib.compress(image.tobytes(), 9)) for image in lines]
    return -torch.tensor(sizes, dtype=torch.float32, device=images.device) / 1000


def mostly(colour: str) -> Score:
    """How much of what is drawn on white has the colour, from 0 to 1, with a soft boundary and a gradient."""
    wanted = _wanted(colour)

    def score(images: Tensor) -> Tensor:
        ink, chroma, cosine = _colours(images, wanted)
        alike = torch.sigmoid((cosine - _SAME_HUE) / _SOFTNESS) * chroma / (chroma + _FAINT)
        return (ink * alike).mean((1, 2)) / (ink.mean((1, 2)) + _LEAST)

    return score


def share_of(colour: str) -> Score:
    """The share of the pixels that are not paper whose hue is within thirty degrees of the colour's: what `mostly` is
    judged by."""
    wanted = _wanted(colour)

    def score(images: Tensor) -> Tensor:
        ink, chroma, cosine = _colours(images, wanted)
        drawn = ink > _PAPER
        same = drawn & (cosine > _SAME_HUE) & (chroma > _FAINT)
        return same.float().sum((1, 2)) / drawn.float().sum((1, 2)).clamp(min=_LEAST * drawn[0].numel())

    return score


def _wanted(colour: str) -> Tensor:
    if colour not in HUES:
        raise ValueError(f"there is no colour {colour!r}: give one of {', '.join(HUES)}")
    return torch.tensor(HUES[colour])


def _colours(images: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each pixel, (P, H, W): its distance from white, its distance from grey, and the cosine of its hue with that of
    the colour `wanted`."""
    ink = (1 - images).square().mean(1).clamp(min=1e-12).sqrt()
    hue = images - images.mean(1, keepdim=True)
    chroma = hue.square().sum(1).clamp(min=1e-12).sqrt()
    target = (wanted - wanted.mean()).to(images).view(1, 3, 1, 1)
    return ink, chroma, (hue * F.normalize(target, dim=1)).sum(1) / chroma
