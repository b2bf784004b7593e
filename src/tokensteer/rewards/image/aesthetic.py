"""The aesthetic score of LAION: a linear head on the unit vector of an image under CLIP ViT-L/14.

The network is openai/clip-vit-large-patch14, and the head sac+logos+ava1-l14-linearMSE.pth of
christophschuhmann/improved-aesthetic-predictor: layers 768-1024-128-64-16-1 with only dropout between them, which does
nothing here. It needs no prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokensteer.rewards.image.clip import image_vectors
from tokensteer.rewards.image.networks import linear_head, loaded
from tokensteer.rewards.image.pixels import Preparation


@dataclass(frozen=True, eq=False)
class Aesthetic:
    """head(unit vector) of images (P, 3, H, W) in [0, 1], about 1 to 10. It has a gradient."""

    network: Any
    head: nn.Module
    prepare: Preparation
    differentiable: bool = field(default=True, init=False)

    def __call__(self, images: Tensor) -> Tensor:
        return self.head(image_vectors(self.network, self.prepare, images)).squeeze(-1)


def aesthetic(
    folder: str | Path,
    head: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Aesthetic:
    """The aesthetic score from a folder with a CLIPModel and the file of the published head."""
    network, _ = loaded("CLIPModel", folder, device, dtype)
    prepare = Preparation(int(network.config.vision_config.image_size)).of_folder(Path(folder))
    return Aesthetic(network, linear_head(head, int(network.config.projection_dim), device), prepare)
