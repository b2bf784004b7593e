"""aMUSEd through diffusers: text to image tokens with a U-ViT, and a VQ-GAN that decodes them.

The context of a prompt is what `AmusedPipeline` gives its network: the last but one hidden states of the text encoder,
its projected embedding, and five numbers about the image (width, height, two crop coordinates, an aesthetic score). No
prompt is the empty one, as in the pipeline. The parts are loaded one by one, so that the pipeline class itself, which
diffusers has deprecated, is not needed. Tested on small random networks of the same classes, not on the published
weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tokensteer.adapters.grid import TokenGrid
from tokensteer.adapters.images import ImageModel
from tokensteer.core.kernels.maskgit import MaskGIT
from tokensteer.core.models.context import Context
from tokensteer.hub import diffusers, pipeline_part, transformers

STEPS, TEMPERATURE = 12, 2.0  # of the published sampler
PARTS = ("transformer", "vqvae", "text_encoder", "tokenizer", "scheduler")


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
    missing = [name for name in PARTS if getattr(parts, name, None) is None]
    if missing:
        raise ValueError(f"{type(parts).__name__} has no {missing[0]}: give a folder, a hub name or an AmusedPipeline")
    net, mask_id = parts.transformer, int(parts.scheduler.config.mask_token_id)
    codes, vocab_size = int(net.config.codebook_size), int(net.config.vocab_size)
    if not codes <= mask_id < vocab_size:
        raise ValueError(
            f"the scheduler's mask is {mask_id}, and the network reads {vocab_size} ids and writes {codes}: the mask "
            "must be one that it reads and does not write, so the parts are of different models"
        )
    factor = 2 ** (len(parts.vqvae.config.block_out_channels) - 1)
    size = [int(net.config.sample_size) * factor if given is None else given for given in (height, width)]
    if any(side < factor or side % factor for side in size):
        raise ValueError(f"images are {factor} pixels to a token: height and width must be multiples, got {size}")
    about = torch.tensor([[size[1], size[0], *crop, aesthetic_score]], device=net.device)

    def encode(prompts: Sequence[str]) -> Context:
        states, pooled = read_prompts(parts.tokenizer, parts.text_encoder, prompts)
        return states.to(net.dtype), pooled.to(net.dtype), about.to(net.dtype).expand(len(prompts), -1)

    grid = TokenGrid(net, _logits(net), (size[0] // factor, size[1] // factor), vocab_size, net.embed.embeddings)
    kernel = MaskGIT(mask_id, temperature=TEMPERATURE)
    return ImageModel(grid, mask_id, encode, encode([""]), kernel, STEPS, _decoder(parts.vqvae))


@torch.no_grad()
def read_prompts(tokenizer: Any, text_encoder: Any, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """The hidden states (B, L, H) of the last layer but one, and the projected embeddings (B, D). Prompts that do not
    fit are refused, where the pipeline would cut them off."""
    length = tokenizer.model_max_length
    for prompt in prompts:
        taken = len(tokenizer(prompt)["input_ids"])
        if taken > length:
            raise ValueError(f"{prompt[:40]!r} takes {taken} of {length} tokens: shorten the prompt")
    ids = tokenizer(list(prompts), return_tensors="pt", padding="max_length", max_length=length)["input_ids"]
    read = text_encoder(ids.to(text_encoder.device), output_hidden_states=True)
    return read.hidden_states[-2], read.text_embeds


def _logits(net: Any) -> Any:
    def call(ids: Tensor, states: Tensor, pooled: Tensor, about: Tensor) -> Tensor:
        logits = net(ids, encoder_hidden_states=states, pooled_text_emb=pooled, micro_conds=about)
        return logits.flatten(2).mT  # from (P, K, h, w)

    return call


def _decoder(vqvae: Any) -> Any:
    def decode(ids: Tensor) -> Tensor:
        shape = (*ids.shape, vqvae.config.latent_channels)
        return vqvae.decode(ids, force_not_quantize=True, shape=shape).sample

    return decode


def _load(name: str, device: torch.device | str, dtype: torch.dtype, variant: str | None) -> Any:
    images, texts = diffusers(), transformers()
    weights: dict[str, Any] = {"use_safetensors": True, "variant": variant}

    def ready(net: nn.Module) -> nn.Module:
        return net.to(device).eval().requires_grad_(False)

    return SimpleNamespace(
        transformer=ready(pipeline_part(images, "UVit2DModel", name, "transformer", torch_dtype=dtype, **weights)),
        vqvae=ready(pipeline_part(images, "VQModel", name, "vqvae", torch_dtype=torch.float32, **weights)),
        scheduler=pipeline_part(images, "AmusedScheduler", name, "scheduler"),
        text_encoder=ready(
            pipeline_part(texts, "CLIPTextModelWithProjection", name, "text_encoder", dtype=dtype, **weights)
        ),
        tokenizer=pipeline_part(texts, "CLIPTokenizer", name, "tokenizer"),
    )
