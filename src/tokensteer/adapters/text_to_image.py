"""Text-to-image pipelines of diffusers with a masked transformer and a VQ-GAN: what aMUSEd and Meissonic share.

The context of a prompt is what those pipelines give their network: the last but one hidden states of a CLIP text
encoder, its projected embedding, and five numbers about the image (width, height, two crop coordinates, an aesthetic
score). No prompt is the empty one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tokensteer.adapters.grid import Codes, TokenGrid
from tokensteer.adapters.images import Decoder, ImageModel
from tokensteer.core.kernels.maskgit import MaskGIT
from tokensteer.core.models.context import Context
from tokensteer.hub import diffusers, pipeline_part, transformers

PARTS = ("transformer", "vqvae", "text_encoder", "tokenizer", "scheduler")
TEMPERATURE = 2.0  # of the noise in the published samplers, which falls to 0


@dataclass(frozen=True)
class Picture:
    """The images that are asked for: sizes in pixels, and the further numbers that a network is conditioned on."""

    height: int
    width: int
    crop: tuple[int, int] = (0, 0)
    aesthetic_score: float = 6.0

    def grid(self, factor: int) -> tuple[int, int]:
        """Rows and columns of tokens of `factor` pixels."""
        if any(side < factor or side % factor for side in (self.height, self.width)):
            raise ValueError(
                f"images are {factor} pixels to a token: height and width must be multiples, got "
                f"{[self.height, self.width]}"
            )
        return self.height // factor, self.width // factor

    def numbers(self) -> list[float]:
        return [self.width, self.height, *self.crop, self.aesthetic_score]


def masked_pipeline(
    parts: Any, call: Codes, picture: Picture, steps: int, *, ignores_time: bool = True, length: int | None = None
) -> ImageModel:
    """The model of a pipeline's parts. `call` is the transformer on grids, given the time unless it is ignored. Prompts
    take `length` tokens, by default the tokenizer's limit."""
    net, mask_id = parts.transformer, int(parts.scheduler.config.mask_token_id)
    codes, vocab_size = int(net.config.codebook_size), int(net.config.vocab_size)
    if not codes <= mask_id < vocab_size:
        raise ValueError(
            f"the scheduler's mask is {mask_id}, and the network reads {vocab_size} ids and writes {codes}: the mask "
            "must be one that it reads and does not write, so the parts are of different models"
        )
    weight = next(net.parameters())
    about = torch.tensor([picture.numbers()], device=weight.device, dtype=weight.dtype)

    def encode(prompts: Sequence[str]) -> Context:
        states, pooled = read_prompts(parts.tokenizer, parts.text_encoder, prompts, length)
        return states.to(weight.dtype), pooled.to(weight.dtype), about.expand(len(prompts), -1)

    grid = TokenGrid(net, call, picture.grid(pixels_per_token(parts.vqvae)), vocab_size, net.embed.embeddings)
    kernel = MaskGIT(mask_id, temperature=TEMPERATURE)
    return ImageModel(grid, mask_id, encode, encode([""]), kernel, steps, vq_decoder(parts.vqvae), ignores_time)


def pixels_per_token(vqvae: Any) -> int:
    return 2 ** (len(vqvae.config.block_out_channels) - 1)


@torch.no_grad()
def read_prompts(
    tokenizer: Any, text_encoder: Any, prompts: Sequence[str], length: int | None = None
) -> tuple[Tensor, Tensor]:
    """The hidden states (B, L, H) of the last layer but one, and the projected embeddings (B, D). Prompts that do not
    fit are refused, where the pipelines would cut them off."""
    limit = int(tokenizer.model_max_length if length is None else length)
    for prompt in prompts:
        taken = len(tokenizer(prompt)["input_ids"])
        if taken > limit:
            raise ValueError(f"{prompt[:40]!r} takes {taken} of {limit} tokens: shorten the prompt")
    ids = tokenizer(list(prompts), return_tensors="pt", padding="max_length", max_length=limit)["input_ids"]
    read = text_encoder(ids.to(text_encoder.device), output_hidden_states=True)
    return read.hidden_states[-2], read.text_embeds


def vq_decoder(vqvae: Any) -> Decoder:
    """Pixels of ids (P, h, w), or of one-hots (P, h, w, V), which have a gradient: they are multiplied with the
    codebook, and ids that are no codes count for nothing."""

    def decode(codes: Tensor) -> Tensor:
        if not codes.is_floating_point():
            shape = (*codes.shape, vqvae.config.latent_channels)
            return vqvae.decode(codes, force_not_quantize=True, shape=shape).sample
        table = vqvae.quantize.embedding.weight
        latents = codes[..., : len(table)].to(table.dtype) @ table
        return vqvae.decoder(vqvae.post_quant_conv(latents.permute(0, 3, 1, 2)))

    return decode


def load_parts(
    name: str,
    transformer: Callable[[], nn.Module],
    device: torch.device | str,
    dtype: torch.dtype,
    variant: str | None,
) -> Any:
    """The parts of a pipeline by folder or hub name, one by one, so that its class is not needed. Images are decoded in
    float32."""
    images, texts = diffusers(), transformers()
    weights: dict[str, Any] = {"use_safetensors": True, "variant": variant}

    def ready(net: nn.Module) -> nn.Module:
        return net.to(device).eval().requires_grad_(False)

    return SimpleNamespace(
        transformer=ready(transformer()),
        vqvae=ready(pipeline_part(images, "VQModel", name, "vqvae", torch_dtype=torch.float32, **weights)),
        scheduler=pipeline_part(images, "AmusedScheduler", name, "scheduler"),
        text_encoder=ready(
            pipeline_part(texts, "CLIPTextModelWithProjection", name, "text_encoder", dtype=dtype, **weights)
        ),
        tokenizer=pipeline_part(texts, "CLIPTokenizer", name, "tokenizer"),
    )


def checked_parts(parts: Any, mend: str) -> Any:
    """The parts, if none is missing."""
    missing = [name for name in PARTS if getattr(parts, name, None) is None]
    if missing:
        raise ValueError(f"{type(parts).__name__} has no {missing[0]}: {mend}")
    return parts
