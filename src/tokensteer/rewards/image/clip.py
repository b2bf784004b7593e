"""CLIP scores: the cosine of an image and a prompt in the space of a CLIP network. HPSv2 is one of them.

CLIP score: 100 · cosine, under any network of the class CLIPModel.

HPSv2 (Human Preference Score) is the same under a fine-tuned OpenCLIP ViT-H/14. The published file
(HPS_v2_compressed.pt, or HPS_v2.1_compressed.pt) has the names of open_clip; `clip_layout` renames them to those of
CLIPModel. The folder then needs the config and tokenizer of laion/CLIP-ViT-H-14-laion2B-s32B-b79K. Images that are not
square are padded there, not cropped. The published function returns the cosine; tables show 100 times that, as here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tokensteer.core.models.context import Context
from tokensteer.rewards.image.networks import encoded, loaded
from tokensteer.rewards.image.pixels import Preparation


@dataclass(frozen=True, eq=False)
class ClipScore:
    """100 · cosine of images (P, 3, H, W) in [0, 1] and prompts (P, D), rows of `encode`. It has a gradient."""

    network: Any
    tokenizer: Any
    prepare: Preparation
    truncate: bool = False
    differentiable: bool = field(default=True, init=False)

    @torch.no_grad()
    def encode(self, prompts: str | Sequence[str]) -> Context:
        """The unit vectors of prompts, (B, D)."""
        length = int(self.network.config.text_config.max_position_embeddings)
        ids, mask = (part.to(self.network.device) for part in encoded(self.tokenizer, prompts, length, self.truncate))
        pooled = self.network.text_model(input_ids=ids, attention_mask=mask).pooler_output
        return (F.normalize(self.network.text_projection(pooled).float(), dim=-1),)

    def __call__(self, images: Tensor, prompts: Tensor) -> Tensor:
        return 100 * (image_vectors(self.network, self.prepare, images) * prompts).sum(-1)


def image_vectors(network: Any, prepare: Preparation, images: Tensor) -> Tensor:
    """Unit vectors (P, D) of images."""
    pooled = network.vision_model(pixel_values=prepare(images.float()).to(network.dtype)).pooler_output
    return F.normalize(network.visual_projection(pooled).float(), dim=-1)


def clip_score(
    folder: str | Path,
    *,
    truncate: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> ClipScore:
    """The CLIP score of a folder with a CLIPModel and its tokenizer. Prompts that are too long are refused, or cut off
    if `truncate`. `dtype` None keeps the precision of the weights."""
    return _score(folder, False, truncate, device, dtype)


def hpsv2(
    folder: str | Path,
    *,
    truncate: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> ClipScore:
    """HPSv2 of a folder with its weights as a CLIPModel, which `clip_layout` makes of the published file."""
    return _score(folder, True, truncate, device, dtype)


def _score(
    folder: str | Path, pad: bool, truncate: bool, device: torch.device | str, dtype: torch.dtype | None
) -> ClipScore:
    network, tokenizer = loaded("CLIPModel", folder, device, dtype)
    prepare = Preparation(int(network.config.vision_config.image_size), pad=pad).of_folder(Path(folder))
    return ClipScore(network, tokenizer, prepare, truncate)
