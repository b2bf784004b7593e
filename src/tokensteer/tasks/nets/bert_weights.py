"""The weights of a published encoder, by BERT's names, in networks of its layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from tokensteer.tasks.nets.encoder import Encoder, EncoderReader
from tokensteer.tasks.nets.text_encoder import TextEncoder

CLS, SEP = 101, 102  # in BERT's vocabulary


def start_from(
    net: Encoder | EncoderReader | TextEncoder, weights: Mapping[str, Tensor], origin: Sequence[int]
) -> None:
    """Give a network the embeddings and as many layers of an encoder as it has; `origin` holds the ids of its tokens
    there. A network that reads texts without [CLS] and [SEP] has the positions that they have between them."""
    words, places = (weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position"))
    framed = isinstance(net, EncoderReader) and net.config.framed
    first = 0 if framed or isinstance(net, TextEncoder) else 1
    state = {
        "tokens.weight": words[list(origin)],
        "places": places[first : first + len(net.places)] + weights["embeddings.token_type_embeddings.weight"][0],
        **renamed(weights, "embeddings.LayerNorm", "enter"),
    }
    if framed:
        state["frame"] = words[[CLS, SEP]]
    for place in range(len(net.layers)):
        ours, theirs = f"layers.{place}", f"encoder.layer.{place}"
        for end in ("weight", "bias"):
            parts = [weights[f"{theirs}.attention.self.{part}.{end}"] for part in ("query", "key", "value")]
            state[f"{ours}.qkv.{end}"] = torch.cat(parts)
        for there, here in _LAYER.items():
            state |= renamed(weights, f"{theirs}.{there}", f"{ours}.{here}")
    fill(net, state)


_LAYER = {
    "attention.output.dense": "out",
    "attention.output.LayerNorm": "after_mix",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "after_mlp",
}


def renamed(weights: Mapping[str, Tensor], there: str, here: str) -> dict[str, Tensor]:
    """Weight and bias of a layer by the name that it has here."""
    return {f"{here}.{end}": weights[f"{there}.{end}"] for end in ("weight", "bias")}


@torch.no_grad()
def fill(net: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give a network some of its weights."""
    own = dict(net.named_parameters())
    for name, value in state.items():
        if own[name].shape != value.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, and the network {tuple(own[name].shape)}")
        own[name].copy_(value)
