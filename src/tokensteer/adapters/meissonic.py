"""Meissonic: text to image tokens with a transformer of Flux's layout, and a VQ-GAN that decodes them.

Its text encoder, VQ-GAN and scheduler are those of aMUSEd (`text_to_image`); its transformer is a class of its own,
published at github.com/viiika/Meissonic (src/transformer.py, with src/pipeline.py). The transformer reads ids (P, h, w)
and returns logits (P, K, h, w). It takes three things more:

    img_ids     places of the hidden sites, (sites, 3): 0, row, column. A transformer with config.downsample halves the
                grid first, so there are h/2 · w/2 of them, else h · w.
    txt_ids     zeros (tokens, 3).
    timestep    the pipeline counts down, T - 1, ..., 0, in T steps. The published training gives 1000 times the share
                of masked sites instead, and the transformer multiplies either by 1000. The default is the pipeline's.

Published sizes are 8,256 ids and 8,192 codes, the mask is the last id, prompts take 77 tokens, and the pipeline takes
48 steps at a guidance scale of 9. Tested on a small random network of this signature, not on the published weights.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tokensteer.adapters.images import ImageModel
from tokensteer.adapters.text_to_image import Picture, checked_parts, load_parts, masked_pipeline, pixels_per_token
from tokensteer.core.models.denoiser import Time
from tokensteer.core.numerics.domains import check_whole
from tokensteer.hub import pipeline_part

STEPS, LENGTH, SIDE = 48, 77, 1024  # of the published pipeline: steps, tokens of a prompt, pixels

Timestep = Callable[[Tensor], Tensor]
"""The `timestep` (P,) of times (P,) in (0, 1]."""


def counted_down(steps: int) -> Timestep:
    """T·t - 1, as the pipeline of T steps counts: T - 1 at the first, t = 1, and 0 at the last, t = 1/T."""
    return lambda t: (steps * t - 1).round().clamp(min=0)


def masked_share(t: Tensor) -> Tensor:
    """1000 · sin(pi·t/2), 1000 times the share of masked sites at the cosine pace, as in the published training."""
    return 1000 * torch.sin(t * (torch.pi / 2))


def meissonic(
    source: str | Path | Any = "MeissonFlow/Meissonic",
    transformer: nn.Module | type | str | None = None,
    *,
    height: int = SIDE,
    width: int = SIDE,
    crop: tuple[int, int] = (0, 0),
    aesthetic_score: float = 6.0,
    steps: int = STEPS,
    timestep: Timestep | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    variant: str | None = None,
) -> ImageModel:
    """Meissonic of a folder, the hub, or a pipeline that is already loaded, which is used as it is.

    A folder needs `transformer`: the network itself, its class, or where that class is, such as
    "src.transformer:Transformer2DModel" if the published repository is on the path. Sizes are in pixels. `steps` is the
    number of steps that `timestep` counts down, and the default of `diffusion`; a diffusion in fewer skips some.
    `timestep` is another function of the time, such as `masked_share`. In `dtype` are the network and the text encoder.
    """
    check_whole("meissonic: steps", steps, 1)
    if isinstance(source, str | Path):
        name = str(source)
        parts = load_parts(name, lambda: _transformer(transformer, name, dtype, variant), device, dtype, variant)
    elif transformer is not None:
        raise ValueError("transformer=... goes with a folder or hub name: parts that are loaded have their own")
    else:
        parts = source
    net = checked_parts(parts, "give a folder, a hub name or a pipeline with Meissonic's parts").transformer
    picture = Picture(height, width, crop, aesthetic_score)
    rows, columns = picture.grid(pixels_per_token(parts.vqvae))
    halved = 2 if getattr(net.config, "downsample", False) else 1
    if rows % halved or columns % halved:
        raise ValueError(
            f"the transformer halves a grid of {rows} × {columns} tokens: height and width must be multiples of "
            f"{2 * pixels_per_token(parts.vqvae)} pixels"
        )
    places = _places(rows // halved, columns // halved)
    clock = counted_down(steps) if timestep is None else timestep

    def call(ids: Tensor, t: Time, states: Tensor, pooled: Tensor, about: Tensor) -> Tensor:
        times = torch.as_tensor(t, device=ids.device).expand(len(ids))
        logits = net(
            hidden_states=ids,
            encoder_hidden_states=states,
            micro_conds=about,
            pooled_projections=pooled,
            timestep=clock(times),
            img_ids=places.to(ids.device),
            txt_ids=states.new_zeros(states.shape[1], 3),
        )
        return logits.flatten(2).mT  # from (P, K, h, w)

    length = min(LENGTH, parts.tokenizer.model_max_length)
    return masked_pipeline(parts, call, picture, steps, ignores_time=False, length=length)


def _places(rows: int, columns: int) -> Tensor:
    """0, row and column of each hidden site, (rows·columns, 3)."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([torch.zeros_like(row), row, column], -1).flatten(0, 1)


def _transformer(given: nn.Module | type | str | None, name: str, dtype: torch.dtype, variant: str | None) -> nn.Module:
    if isinstance(given, nn.Module):
        return given
    if given is None:
        raise ValueError(
            f"{name} needs the class of its transformer, which no library has: fetch the code of "
            "github.com/viiika/Meissonic, put its folder on the path, and pass "
            'transformer="src.transformer:Transformer2DModel", the class, or a loaded network'
        )
    kind = _found(given) if isinstance(given, str) else given
    library = SimpleNamespace(**{kind.__name__: kind})
    more: dict[str, Any] = {"torch_dtype": dtype, "use_safetensors": True, "variant": variant}
    return pipeline_part(library, kind.__name__, name, "transformer", **more)


def _found(place: str) -> type:
    """The class at "module:Class"."""
    module, _, kind = place.partition(":")
    try:
        return getattr(import_module(module), kind)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"there is no class at {place!r} ({error}): write it as module:Class, with the folder that holds the "
            "module on the path (sys.path, or PYTHONPATH)"
        ) from error
