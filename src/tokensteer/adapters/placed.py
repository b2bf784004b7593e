"""A network on another device than the particles.

Weights of particles are kept in 64 bits, which Apple's GPUs do not have. There the particles stay on the CPU and only
networks compute on the GPU, where nearly all the time is spent:

    network = placed(network, "mps")
    model = ts.Diffusion(ts.from_logits(network, mask_id), ...)
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn


class Placed(nn.Module):
    """Moves tensors to the network's device and type, and its answer back to where they were. Gradients pass."""

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.network, self.device = network, device
        floats = (weight.dtype for weight in network.parameters() if weight.is_floating_point())
        self.dtype = next(floats, torch.float32)

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        return self.network(*map(self._moved, (x, *more))).to(x.device)

    def _moved(self, given: Any) -> Any:
        if not isinstance(given, Tensor):
            return given
        return given.to(self.device, self.dtype if given.is_floating_point() else None)


def placed(network: nn.Module, device: torch.device | str) -> Placed:
    """The network moved to a device, to be called with tensors of any other: a denoiser's or a reward's."""
    if not isinstance(cast("object", network), nn.Module):
        raise TypeError(f"placed: the network must be a torch.nn.Module, which can be moved, got {network!r}")
    return Placed(network.to(device), torch.device(device))
