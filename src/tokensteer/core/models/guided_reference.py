"""The guided sampler as a model: at each site the normalised product of two predictions.

Classifier-free guidance is used in two ways. As samplers of images use it (Meissonic, aMUSEd, MaskGIT), the prediction
is mu_g(v) = mu(v | c)^s · mu(v)^(1 - s) / sum_v' mu(v' | c)^s · mu(v')^(1 - s): tokens are drawn from it, and nothing
else is kept. `guided_reference` makes that a `Diffusion` of its own, whose samples need no weights; a tilt on top of it
has the target p_g(x) · exp(r(x)/kl). It is not p(x | c)^s · p(x)^(1 - s): the normalisers it divides by depend on the
path. That product is the target of `guided` (`core.models.product`), whose weights make up for the normalisers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokensteer.core.categorical.product import product_of_powers
from tokensteer.core.models.context import joined
from tokensteer.core.models.denoiser import Denoiser, FromLogits, Time, from_logits, ignores_time
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.numerics.domains import check_number

Network = Callable[..., Tensor]
"""Logits (P, L, V) of ids (P, L), the time if it depends on that, and rows of context."""


def guided_reference(conditional: Diffusion, other: Diffusion, scale: float) -> Diffusion:
    """The model that predicts mu(v | c)^scale · mu_other(v)^(1 - scale), normalised; scale = 1 is the conditional.

    `other` is the model without the condition, or with a negative prompt. Contexts are by population, as theirs are; a
    single row of either goes with all rows of the other.
    """
    check_number("guided_reference: scale", scale, "(0, inf)", "1 is the conditional model")
    if other.vocab_size != conditional.vocab_size or other.kernel.mask_id != conditional.kernel.mask_id:
        raise ValueError(
            "guided_reference: the two models differ in their vocabulary or mask: make the second with "
            "dataclasses.replace(conditional, context=...) or (denoiser=...)"
        )
    if scale == 1:
        return conditional
    mask_id = conditional.kernel.mask_id
    timeless = ignores_time(conditional.denoiser) and ignores_time(other.denoiser)
    one, two = (_logits(model.denoiser, mask_id, timed=not timeless) for model in (conditional, other))
    network = product_network(one, two, len(conditional.conditions), (scale, 1.0 - scale), timed=not timeless)
    denoiser = from_logits(network, mask_id, ignores_time=timeless)
    return replace(conditional, denoiser=denoiser, context=joined(conditional.conditions, other.conditions))


def product_network(one: Network, other: Network, own: int, powers: tuple[float, float], *, timed: bool) -> Network:
    """A network with the logits powers[0] · one + powers[1] · other. All three are called with x, the time if they are
    `timed`, and tensors of context: the first `own` of those given are for `one`, the rest for `other`."""

    def logits(x: Tensor, *given: Time) -> Tensor:
        before = 1 if timed else 0
        time, context = given[:before], given[before:]
        parts = (one, context[:own]), (other, context[own:])
        return product_of_powers((network(x, *time, *rows) for network, rows in parts), powers)

    return logits


def _logits(denoiser: Denoiser, mask_id: int, *, timed: bool) -> Network:
    """The logs of predictions up to a constant at each site; 0 at the mask, which the product leaves out."""

    def logits(x: Tensor, *given: Any) -> Tensor:
        given = given if timed else (0.5, *given)  # any time: it is ignored
        found = denoiser.logits(x, *given) if isinstance(denoiser, FromLogits) else denoiser(x, *given)
        found = found.to(torch.promote_types(found.dtype, torch.float32))
        if not 0 <= mask_id < found.shape[-1]:
            return found
        return found.masked_fill(torch.arange(found.shape[-1], device=found.device) == mask_id, 0.0)

    return logits
