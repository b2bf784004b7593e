"""Networks of image rewards: parts of the transformers library from local folders, and published linear heads."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from tokensteer.hub import Source

LAYER = re.compile(r"(?:mlp\.)?layers\.(\d+)\.(weight|bias)")
_UNREADABLE = (SafetensorError, OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError)


def loaded(kind: str, folder: str | Path, device: torch.device | str, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """A frozen network of the class `kind` and its tokenizer, from a local folder. Nothing is fetched."""
    if not Path(folder).is_dir():
        raise ValueError(
            f"{folder} is no folder: give one with config.json, weights as safetensors and a tokenizer, as "
            "save_pretrained writes it"
        )
    source = Source(str(folder), dtype=dtype, device=device)
    config = source.config()
    family = "blip" if kind.startswith("Blip") else "clip"
    if config.model_type != family:
        raise ValueError(f"{folder} holds a model of the kind {config.model_type}: give one of the kind {family}")
    return source.network(kind, config), source.tokenizer()


def encoded(tokenizer: Any, prompts: str | Sequence[str], length: int, truncate: bool) -> tuple[Tensor, Tensor]:
    """Ids and attention mask of prompts, (B, length) each. Those that do not fit are refused, or cut off."""
    several = [prompts] if isinstance(prompts, str) else list(prompts)
    if not several:
        raise ValueError("there is no prompt: give one, or a list of several")
    for prompt in several:
        taken = len(tokenizer(prompt)["input_ids"])
        if taken > length and not truncate:
            raise ValueError(
                f"{prompt[:40]!r} takes {taken} of {length} tokens: shorten it, or cut it off with truncate=True"
            )
    read = tokenizer(several, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    return read["input_ids"], read["attention_mask"]


def read_weights(file: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of one that torch.save wrote, of which only tensors are read."""
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}: give the one with the published weights")
    try:
        if path.suffix == ".safetensors":
            return load_file(str(path))
        stored = cast("dict[str, Any]", torch.load(path, map_location="cpu", weights_only=True))
        return cast("dict[str, Tensor]", stored.get("state_dict", stored))
    except (*_UNREADABLE, AttributeError) as error:
        raise ValueError(f"{path} is damaged, or no file of tensors: fetch it again, or save it anew") from error


def linear_head(file: str | Path, width: int, device: torch.device | str) -> nn.Module:
    """The published head, linear layers one after the other with nothing between them (768-1024-128-64-16-1), from
    tensors named layers.0.weight, layers.0.bias, ..., or mlp.layers.0.weight, ...; other tensors are ignored."""
    found = {match.groups(): tensor for name, tensor in read_weights(file).items() if (match := LAYER.fullmatch(name))}
    places = sorted({int(place) for place, _ in found})
    layers: list[nn.Linear] = []
    for place in places:
        try:
            weight, bias = found[str(place), "weight"], found[str(place), "bias"]
            layer = nn.Linear(weight.shape[1], weight.shape[0])
            layer.load_state_dict({"weight": weight.float(), "bias": bias.float()})
        except (KeyError, IndexError, RuntimeError) as error:
            raise ValueError(f"{file} has no whole layer {place}: give the file of the published head") from error
        layers.append(layer)
    sizes = [width, *(layer.out_features for layer in layers)]
    if (
        not layers
        or sizes[-1] != 1
        or any(layer.in_features != size for layer, size in zip(layers, sizes, strict=False))
    ):
        shapes = [(layer.in_features, layer.out_features) for layer in layers]
        raise ValueError(
            f"{file} holds layers {shapes}, and a head from {width} numbers to one is needed: give the head that was "
            "trained on this network"
        )
    return nn.Sequential(*layers).to(device).eval().requires_grad_(False)
