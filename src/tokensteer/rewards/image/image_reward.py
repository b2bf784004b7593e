"""ImageReward: a linear head on BLIP, which reads the prompt while it looks at the image.

The text encoder of BLIP attends to the states of the image; its first state goes through layers 768-1024-128-64-16-1
with nothing between them, and the number is standardised by the published mean and standard deviation
(THUDM/ImageReward, ImageReward/ImageReward.py). The published file, ImageReward.pt, holds both: `blip_layout` renames
the tensors of BLIP to those of BlipForImageTextRetrieval, and `head` may be the file itself. The tokenizer is that of
bert-base-uncased, and prompts take 35 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokensteer.core.models.context import Context
from tokensteer.rewards.image.networks import encoded, linear_head, loaded
from tokensteer.rewards.image.pixels import Preparation

MEAN, STD = 0.16717362830052426, 1.0333394966054072
LENGTH = 35  # tokens of a prompt


@dataclass(frozen=True, eq=False)
class ImageReward:
    """(head(first state) - mean) / std of images (P, 3, H, W) in [0, 1] and prompts, rows of `encode`: ids and mask,
    (P, 35) each. It has a gradient."""

    network: Any
    tokenizer: Any
    head: nn.Module
    prepare: Preparation
    length: int = LENGTH
    truncate: bool = False
    differentiable: bool = field(default=True, init=False)

    def encode(self, prompts: str | Sequence[str]) -> Context:
        """Ids and attention mask of prompts, (B, length) each."""
        ids, mask = encoded(self.tokenizer, prompts, self.length, self.truncate)
        return ids.to(self.network.device), mask.to(self.network.device)

    def __call__(self, images: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        pixels = self.prepare(images.float()).to(self.network.dtype)
        seen = self.network.vision_model(pixel_values=pixels).last_hidden_state
        read = self.network.text_encoder(
            input_ids=ids,
            attention_mask=mask,
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=seen.device),
        ).last_hidden_state
        return (self.head(read[:, 0].float()).squeeze(-1) - MEAN) / STD


def image_reward(
    folder: str | Path,
    head: str | Path,
    *,
    truncate: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> ImageReward:
    """ImageReward from a folder with a BlipForImageTextRetrieval and its tokenizer, and the file of the head."""
    network, tokenizer = loaded("BlipForImageTextRetrieval", folder, device, dtype)
    prepare = Preparation(int(network.config.vision_config.image_size)).of_folder(Path(folder))
    text = network.config.text_config
    length = min(LENGTH, int(text.max_position_embeddings))
    made = linear_head(head, int(text.hidden_size), device)
    return ImageReward(network, tokenizer, made, prepare, length, truncate)
