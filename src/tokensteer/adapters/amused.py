"""aMUSEd through diffusers: text to image tokens with a U-ViT, and a VQ-GAN that decodes them.

The context of a prompt is what `AmusedPipeline` gives its network (`text_to_image`). The parts are loaded one by one,
so that the pipeline class itself, which diffusers has deprecated, is not needed. Tested on small random networks of the
same classes, not on the published weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokensteer.adapters.images import ImageModel
from tokensteer.adapters.text_to_image import Picture, checked_parts, load_parts, masked_pipeline, pixels_per_token
from tokensteer.hub import diffusers, pipeline_part

STEPS = 12  # of the published sampler


def amused(
    source: str | Path | Any = "amused/amused-256",
    *,
    height: int | None = None,
    width: int | None = None,
    crop: tuple[int, int] = (0, 0),
    aesthetic_score: float = 6.0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    variant: str | None = None,
) -> ImageModel:
    """aMUSEd of a folder, the hub, or a pipeline that is already loaded, which is used as it is.

    Sizes are in pixels, by default those that the network was trained for. Its own order is the default, `MaskGIT` at
    the pipeline's temperature in 12 steps. In `dtype` are the network and the text encoder; images are decoded in
    float32. `variant` names the file of weights, such as "fp16".
    """
    parts = _load(str(source), device, dtype, variant) if isinstance(source, str | Path) else source
    net = checked_parts(parts, "give a folder, a hub name or an AmusedPipeline").transformer
    side = int(net.config.sample_size) * pixels_per_token(parts.vqvae)
    picture = Picture(side if height is None else height, side if width is None else width, crop, aesthetic_score)

    def call(ids: Tensor, states: Tensor, pooled: Tensor, about: Tensor) -> Tensor:
        logits = net(ids, encoder_hidden_states=states, pooled_text_emb=pooled, micro_conds=about)
        return logits.flatten(2).mT  # from (P, K, h, w)

    return masked_pipeline(parts, call, picture, STEPS)


def _load(name: str, device: torch.device | str, dtype: torch.dtype, variant: str | None) -> Any:
    def transformer() -> Any:
        more: dict[str, Any] = {"torch_dtype": dtype, "use_safetensors": True, "variant": variant}
        return pipeline_part(diffusers(), "UVit2DModel", name, "transformer", **more)

    return load_parts(name, transformer, device, dtype, variant)
