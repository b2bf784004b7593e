"""Scores of images as rewards of tokens.

A score maps images (P, 3, H, W) in [0, 1], and the rows of a context if it has one, to numbers (P,). `of_images` is the
reward score(decode(x)): `decode` maps ids (P, L) to images, and one-hots (P, L, V) if gradients are to reach tokens
through the decoder. `ImageModel.pixels` is such a function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from tokensteer.core.models.context import Context
from tokensteer.rewards.combine import DeclaresGradient

Decode = Callable[[Tensor], Tensor]
Score = Callable[..., Tensor]
"""Numbers (P,) of images (P, 3, H, W) and rows of context, (P, ...) each."""

PilFunction = Callable[[list[Any]], Sequence[float] | Tensor]
"""A number for each of a list of PIL images."""


@dataclass(frozen=True, eq=False)
class OfImages:
    """The reward score(decode(x), context) of ids x, or of one-hots if `differentiable`. `context` is one row, such as
    the encoding of a prompt, which counts for all sequences; rows that the reward is called with come in its place."""

    decode: Decode
    score: Score
    differentiable: bool = True
    context: Context = ()

    def __call__(self, x: Tensor, *context: Tensor) -> Tensor:
        images = checked_images(self.decode(x), len(x))
        return self.score(images, *(context or (part.expand(len(x), *part.shape[1:]) for part in self.context)))


def of_images(
    decode: Decode, score: Score, differentiable: bool | None = None, *, context: Tensor | Sequence[Tensor] = ()
) -> OfImages:
    """The reward score(decode(x)). For a score of images and prompts, `context` is score.encode(prompt). Whether there
    is a gradient is what the score declares, or else True."""
    rows = (context,) if isinstance(context, Tensor) else tuple(context)
    if any(len(part) != 1 for part in rows):
        raise ValueError(f"context has {len(rows[0])} rows: the reward of one prompt has one, score.encode('a prompt')")
    declared: object = score
    if differentiable is None:
        differentiable = declared.differentiable if isinstance(declared, DeclaresGradient) else True
    return OfImages(decode, score, differentiable, rows)


@dataclass(frozen=True, eq=False)
class OfPil:
    """A score from a function of PIL images, without a gradient."""

    function: PilFunction
    differentiable: bool = field(default=False, init=False)

    def __call__(self, images: Tensor) -> Tensor:
        pixels = (images.detach().clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()
        library = _pillow()
        found = self.function([library.fromarray(image) for image in cast("Any", pixels.contiguous()).numpy()])
        r = torch.as_tensor(found, dtype=torch.float64, device=images.device).detach()
        if r.shape != (len(images),):
            raise ValueError(
                f"the function must return a number for each of {len(images)} images, got shape {tuple(r.shape)}"
            )
        return r


of_pil = OfPil  # the public name


def checked_images(images: Tensor, rows: int) -> Tensor:
    """The images, if they are (P, 3, H, W) in floating point."""
    if images.dim() != 4 or images.shape[:2] != (rows, 3) or not images.is_floating_point():
        raise ValueError(
            f"decode must return images ({rows}, 3, H, W) in [0, 1], got {tuple(images.shape)} of {images.dtype}: give "
            "ImageModel.pixels, not ImageModel.decode, which is in bytes"
        )
    return images


def _pillow() -> Any:
    try:
        return import_module("PIL.Image")
    except ImportError as error:
        raise ImportError("functions of PIL images need Pillow: pip install pillow") from error
