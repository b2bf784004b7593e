"""The guided sampler as a model: at each site the normalised product of two predictions.

Classifier-free guidance is used in two ways. As samplers of images use it (Meissonic, aMUSEd, MaskGIT), the prediction
is mu_g(v) = mu(v | c)^s · mu(v)^(1 - s) / sum_v' mu(v' | c)^s · mu(v')^(1 - s): tokens are drawn from it, and nothing
else is kept. `guided_reference` makes that a `Diffusion` of its own, whose samples need no weights; a tilt on top of it
has the target p_g(x) · exp(r(x)/kl). It is not p(x | c)^s · p(x)^(1 - s): the normalisers it divides by depend on the
path. That product is the target of `guided` (`core.models.product`), whose weights make up for the normalisers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tokensteer.core.categorical.product import product_of_powers
from tokensteer.core.models.context import Context, joined
from tokensteer.core.models.denoiser import Denoiser, FromLogits, Time, from_logits, ignores_time
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.numerics.domains import check_number


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
    own, mask_id = len(conditional.conditions), conditional.kernel.mask_id

    def predicted(x: Tensor, t: Time, *context: Tensor) -> Tensor:
        parts = ((conditional.denoiser, context[:own]), (other.denoiser, context[own:]))
        found = (_logits(denoiser, x, t, rows, mask_id) for denoiser, rows in parts)
        return product_of_powers(found, (scale, 1.0 - scale))

    timeless = ignores_time(conditional.denoiser) and ignores_time(other.denoiser)

    def at_any_time(x: Tensor, *context: Tensor) -> Tensor:
        return predicted(x, 0.5, *context)

    denoiser = from_logits(at_any_time if timeless else predicted, mask_id, ignores_time=timeless)
    return replace(conditional, denoiser=denoiser, context=joined(conditional.conditions, other.conditions))


def _logits(denoiser: Denoiser, x: Tensor, t: Time, context: Context, mask_id: int) -> Tensor:
    """The logs of a prediction up to a constant at each site; 0 at the mask, which the product leaves out."""
    found = denoiser.logits(x, t, *context) if isinstance(denoiser, FromLogits) else denoiser(x, t, *context)
    found = found.to(torch.promote_types(found.dtype, torch.float32))
    if not 0 <= mask_id < found.shape[-1]:
        return found
    return found.masked_fill(torch.arange(found.shape[-1], device=found.device) == mask_id, 0.0)
