"""What networks do with images before they read them: resize, crop or pad, normalise. In torch, with a gradient.

Resizing is bicubic with antialiasing, as Pillow does it, and clamped as Pillow clamps; Pillow also rounds to bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.nn import functional as F

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Preparation:
    """Images (P, 3, H, W) in [0, 1] to (P, 3, size, size), normalised by `mean` and `std` of each channel. The shorter
    side is resized to `size` and the middle cut out, or, with `pad`, the longer side, and black put around."""

    size: int
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    pad: bool = False

    def __call__(self, images: Tensor) -> Tensor:
        square = self._square(images)
        mean, std = (square.new_tensor(values).view(1, 3, 1, 1) for values in (self.mean, self.std))
        return (square - mean) / std

    def _square(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        sides = (_inside if self.pad else _outside)(height, width, self.size)
        for step in ((height, sides[1]), sides):  # columns first, as Pillow does, which clamps after either
            if images.shape[-2:] != step:
                images = F.interpolate(images, step, mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)
        if self.pad:
            above, left = ((self.size - side) // 2 for side in sides)
            return F.pad(images, (left, self.size - sides[1] - left, above, self.size - sides[0] - above))
        above, left = (round((side - self.size) / 2) for side in sides)
        return images[..., above : above + self.size, left : left + self.size]

    def of_folder(self, folder: Path) -> Preparation:
        """With mean and std of the folder's preprocessor_config.json, if it has one."""
        file = folder / "preprocessor_config.json"
        if not file.is_file():
            return self
        try:
            stored = cast("dict[str, Any]", json.loads(file.read_text("utf-8")))
            mean, std = tuple(stored.get("image_mean", self.mean)), tuple(stored.get("image_std", self.std))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is damaged ({error}): fetch it again, or remove it") from error
        return replace(self, mean=mean, std=std)


def _outside(height: int, width: int, size: int) -> tuple[int, int]:
    """Sides with the shorter one resized to `size`. Roundings, here and below, are those of published code."""
    return (size, int(size * width / height)) if height <= width else (int(size * height / width), size)


def _inside(height: int, width: int, size: int) -> tuple[int, int]:
    """Sides with the longer one resized to `size`."""
    scale = size / max(height, width)
    return round(height * scale), round(width * scale)
