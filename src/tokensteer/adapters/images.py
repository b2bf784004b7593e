"""Masked image models: token grids, what conditions them, and guidance.

Two conventions of classifier-free guidance are in use. With logits c given the condition and u without it,

    u + s·(c - u)       the scale s (`powers_from_scale`): aMUSEd, Meissonic, diffusers' guidance_scale; s = 1 is c;
    (1 + w)·c - w·u     the weight w (`powers_from_weight`): MaskGIT and Halton-MaskGIT; w = 0 is c.

They are the same for s = 1 + w: tokens are drawn from c^s · u^(1 - s), normalised at each site.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from tokensteer.adapters.grid import GridNetwork
from tokensteer.core.kernels.kernel import Kernel
from tokensteer.core.kernels.schedule import uniform_steps
from tokensteer.core.models.context import Context, joined
from tokensteer.core.models.denoiser import FromLogits, Time, from_logits
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.guided_reference import product_network
from tokensteer.core.models.product import Product

Decoder = Callable[[Tensor], Tensor]
"""Pixels (P, 3, H, W) in [0, 1] of ids (P, h, w), and of one-hots (P, h, w, V) if they are to have a gradient."""


def powers_from_scale(scale: float) -> tuple[float, float]:
    """The powers of the conditional and the unconditional model for u + s·(c - u): (s, 1 - s)."""
    return scale, 1.0 - scale


def powers_from_weight(weight: float) -> tuple[float, float]:
    """The powers of the conditional and the unconditional model for (1 + w)·c - w·u: (1 + w, -w)."""
    return 1.0 + weight, -weight


@dataclass(frozen=True)
class ImageModel:
    """A masked image model. A condition is what its `encode` takes: a text, or a class.

    `network(x, *context)` maps ids (P, h·w) and rows of context to logits; if it does not ignore the time, it is called
    as network(x, t, *context). `nothing` is the context without a condition. `decoder` maps ids (P, h, w) to pixels
    (P, 3, H, W) in [0, 1], and one-hots (P, h, w, V) if pixels are to have a gradient. Where conditions are given, a
    list has one for each population, and None is no condition.
    """

    network: GridNetwork
    mask_id: int
    encode: Callable[[Sequence[Any]], Context]
    nothing: Context
    kernel: Kernel
    steps: int
    decoder: Decoder | None = None
    ignores_time: bool = True

    @property
    def device(self) -> torch.device:
        return self.nothing[0].device

    @property
    def denoiser(self) -> FromLogits:
        """Called with ids, the time, and rows of `context`."""
        return from_logits(self.network, self.mask_id, ignores_time=self.ignores_time)

    def guided(self, powers: tuple[float, float]) -> FromLogits:
        """The denoiser of the usual guided sampler, which normalises the product of two models at each site. Its rows
        of context are those of the condition and, behind them, those of what it is guided away from."""
        codes = self.network.codes
        product = product_network(codes, codes, len(self.nothing), powers, timed=not self.ignores_time)

        def logits(x: Tensor, *given: Time) -> Tensor:
            return self.network.widened(product(x, *given))  # after the product: codes may be few among all ids

        return from_logits(logits, self.mask_id, ignores_time=self.ignores_time)

    def context(self, conditions: Any) -> Context:
        """The rows of one condition, or of a list of them."""
        several = cast("Sequence[Any]", conditions) if isinstance(conditions, list | tuple) else [conditions]
        if not several:
            raise ValueError("there is no condition: give one, a list of several, or None for none")
        rows = [self.nothing if condition is None else self.encode([condition]) for condition in several]
        return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))

    def template(self) -> Tensor:
        """A canvas of masks, (h·w,)."""
        return torch.full((self.network.length,), self.mask_id, device=self.device)

    def diffusion(
        self,
        conditions: Any,
        *,
        powers: tuple[float, float] | None = None,
        against: Any = None,
        steps: int | None = None,
        kernel: Kernel | None = None,
    ) -> Diffusion:
        """The model of one condition, or of several, each of which is a population. With `powers` it is the usual
        guided sampler, away from the conditions `against`; a reward on top of it tilts that sampler."""
        denoiser, context = self.denoiser, self.context(conditions)
        if powers is not None:
            denoiser, context = self.guided(powers), joined(context, self.context(against))
        grid = uniform_steps(self.steps if steps is None else steps)
        return Diffusion(denoiser, self.kernel if kernel is None else kernel, grid, self.template(), context=context)

    def product(
        self,
        conditions: Any,
        powers: tuple[float, float],
        *,
        against: Any = None,
        steps: int | None = None,
        kernel: Kernel | None = None,
    ) -> Product:
        """Guidance as a target, p(x | condition)^a · p(x | against)^b: weights make up for what the guided sampler
        normalises away."""
        conditional = self.diffusion(conditions, steps=steps, kernel=kernel)
        return Product([conditional, replace(conditional, context=self.context(against))], powers)

    def pixels(self, x: Tensor) -> Tensor:
        """Images (P, 3, H, W) in [0, 1] of ids (P, h·w), or of one-hots (P, h·w, V) with a gradient: what
        `rewards.image` scores."""
        if self.decoder is None:
            raise ValueError("the model has no decoder: give it one, a function from ids (P, h, w) to pixels in [0, 1]")
        return self.decoder(x.reshape(len(x), *self.network.grid, *x.shape[2:])).float().clamp(0, 1)

    @torch.no_grad()
    def decode(self, ids: Tensor) -> Tensor:
        """Images (P, 3, H, W) in bytes of ids (..., h·w)."""
        return (self.pixels(ids.reshape(-1, ids.shape[-1])) * 255).round().to(torch.uint8)
