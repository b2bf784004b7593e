"""Masked image models: token grids, what conditions them, and guidance.

Two conventions of classifier-free guidance are in use. With logits c given the condition and u without it,

    u + s·(c - u)       the scale s (`powers_from_scale`): aMUSEd, Meissonic, diffusers' guidance_scale; s = 1 is c;
    (1 + w)·c - w·u     the weight w (`powers_from_weight`): MaskGIT and Halton-MaskGIT; w = 0 is c.

They are the same for s = 1 + w: tokens are drawn from c^s · u^(1 - s), normalised at each site.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tokensteer.adapters.grid import TokenGrid
from tokensteer.core.kernels.kernel import Kernel
from tokensteer.core.kernels.schedule import uniform_steps
from tokensteer.core.models.denoiser import FromLogits, from_logits
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.product import Product

Context = tuple[Tensor, ...]
"""What a network is given besides x and t: tensors with one row for each condition."""


def powers_from_scale(scale: float) -> tuple[float, float]:
    """The powers of the conditional and the unconditional model for u + s·(c - u): (s, 1 - s)."""
    return scale, 1.0 - scale


def powers_from_weight(weight: float) -> tuple[float, float]:
    """The powers of the conditional and the unconditional model for (1 + w)·c - w·u: (1 + w, -w)."""
    return 1.0 + weight, -weight


@dataclass(frozen=True)
class ImageModel:
    """A masked image model. A condition is what its `encode` takes: a text, or a class.

    `network(x, *context)` maps ids (P, h·w) and rows of context to logits. `nothing` is the context without a
    condition. `decoder` maps ids (P, h, w) to pixels (P, 3, H, W) in [0, 1].
    """

    network: TokenGrid
    mask_id: int
    encode: Callable[[Sequence[Any]], Context]
    nothing: Context
    kernel: Kernel
    steps: int
    decoder: Callable[[Tensor], Tensor] | None = None

    @property
    def denoiser(self) -> FromLogits:
        """Of ids and rows of context, of which `context` makes one for each condition."""
        return from_logits(self.network, self.mask_id, ignores_time=True)

    @property
    def device(self) -> torch.device:
        return self.nothing[0].device

    def context(self, conditions: Sequence[Any]) -> Context:
        """The rows of several conditions, in order. None among them is no condition."""
        rows = [self.nothing if condition is None else self.encode([condition]) for condition in conditions]
        if not rows:
            raise ValueError("there is no condition: give one or several, or None for none")
        return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))

    def template(self) -> Tensor:
        """A canvas of masks, (h·w,)."""
        return torch.full((self.network.length,), self.mask_id, device=self.device)

    def given(self, condition: Any, powers: tuple[float, float] | None = None, against: Any = None) -> FromLogits:
        """The denoiser of ids alone, for one condition. With `powers` it is guided, away from `against`: a negative
        prompt, or None for no condition."""
        here, there = self.context([condition]), None if powers is None else self.context([against])

        def logits(x: Tensor) -> Tensor:
            codes = self.network.codes(x, *_rows(here, len(x)))
            if powers is not None and there is not None:
                codes = powers[0] * codes + powers[1] * self.network.codes(x, *_rows(there, len(x)))
            return self.network.widened(codes)

        return from_logits(logits, self.mask_id, ignores_time=True)

    def diffusion(
        self,
        condition: Any,
        *,
        powers: tuple[float, float] | None = None,
        against: Any = None,
        steps: int | None = None,
        kernel: Kernel | None = None,
    ) -> Diffusion:
        """The model of one condition. With `powers` it is the usual guided sampler, which normalises the product of
        both models at each site; a target on top of it tilts that sampler."""
        denoiser = self.given(condition, powers, against)
        kernel = self.kernel if kernel is None else kernel
        return Diffusion(denoiser, kernel, uniform_steps(self.steps if steps is None else steps), self.template())

    def product(
        self,
        condition: Any,
        powers: tuple[float, float],
        *,
        against: Any = None,
        steps: int | None = None,
        kernel: Kernel | None = None,
    ) -> Product:
        """Guidance as a target, p(x | condition)^a · p(x | against)^b: weights make up for what the guided sampler
        normalises away."""
        conditional = self.diffusion(condition, steps=steps, kernel=kernel)
        return Product([conditional, replace(conditional, denoiser=self.given(against))], powers)

    @torch.no_grad()
    def decode(self, ids: Tensor) -> Tensor:
        """Images (P, 3, H, W) in bytes of ids (..., h·w)."""
        if self.decoder is None:
            raise ValueError("the model has no decoder: give it one, a function from ids (P, h, w) to pixels in [0, 1]")
        pixels = self.decoder(ids.reshape(-1, *self.network.grid))
        return (pixels.float().clamp(0, 1) * 255).round().to(torch.uint8)


def _rows(context: Context, count: int) -> Context:
    """The one row of a context for each of `count` particles."""
    return tuple(part.expand(count, *part.shape[1:]) for part in context)
