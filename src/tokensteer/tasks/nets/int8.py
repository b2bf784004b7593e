"""Tensors as 8-bit whole numbers for files: a quarter of the size of float32.

A tensor of two or more axes is stored as round(w / s) in -127..127, with one scale s for each entry of the first axis:
an output channel of a linear or convolutional layer, or a row of a table. The error of a weight is at most s/2, 1/254
of the largest in its channel. Other tensors are stored in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SCALE = ".int8_scale"
"""The suffix of the names of scales."""


def quantise(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices as int8 with a float32 tensor of scales beside each, other tensors as bfloat16."""
    out: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if value.dim() < 2:
            out[name] = value.detach().to(torch.bfloat16)
        else:
            out[name], out[name + SCALE] = rounded(value.detach().float())
    return out


def dequantise(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `quantise`, in float32. Tensors without scales are returned as they are."""
    return {
        name: expanded(value, tensors[name + SCALE]) if name + SCALE in tensors else value
        for name, value in tensors.items()
        if not name.endswith(SCALE)
    }


def rounded(value: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor (D, ...) as int8, and the scale of each of its D parts."""
    scale = value.flatten(1).abs().amax(1) / 127
    per_row = scale.clamp(min=torch.finfo(torch.float32).tiny).view(-1, *[1] * (value.dim() - 1))  # zeros stay zeros
    return (value / per_row).round().clamp(-127, 127).to(torch.int8), scale


def expanded(value: Tensor, scale: Tensor) -> Tensor:
    """The numbers of int8 and scales."""
    return value.float() * scale.float().view(-1, *[1] * (value.dim() - 1))
