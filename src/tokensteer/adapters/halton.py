"""Halton-MaskGIT and other class-conditional networks over token grids, called as vit(code, labels, drop)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tokensteer.adapters.grid import TokenGrid
from tokensteer.adapters.images import ImageModel
from tokensteer.core.kernels.masked import Ancestral
from tokensteer.core.kernels.schedule import Cosine
from tokensteer.core.models.context import Context

STEPS = 32


def halton_maskgit(
    vit: nn.Module,
    *,
    mask_id: int,
    grid: tuple[int, int],
    classes: int | None = None,
    layer: nn.Module | None = None,
    decoder: Callable[[Tensor], Tensor] | None = None,
) -> ImageModel:
    """A network vit(code, labels, drop) of ids (P, h, w), classes (P,) and whether the class is dropped (P,), which
    returns logits (P, h·w, K), with or without a column for the mask.

    In the published networks the mask is the id behind the last code, and `layer`, which gradients need, is
    vit.tok_emb. `decoder` maps ids (P, h, w) to pixels in [0, 1]. Sites open in random order at a cosine pace; the
    published order, a Halton sequence, is not among the kernels.
    """
    device = next((weight.device for weight in vit.parameters()), torch.device("cpu"))

    def encode(labels: Sequence[int]) -> Context:
        wrong = [label for label in labels if label < 0 or (classes is not None and label >= classes)]
        if wrong:
            known = "0 or more" if classes is None else f"from 0 to {classes - 1}"
            raise ValueError(f"there is no class {wrong[0]}: classes are numbers {known}, and None is no class")
        return torch.tensor(list(labels), device=device), torch.zeros(len(labels), dtype=torch.bool, device=device)

    nothing = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, dtype=torch.bool, device=device)
    network = TokenGrid(vit, vit.__call__, grid, mask_id + 1, layer)
    return ImageModel(network, mask_id, encode, nothing, Ancestral(mask_id, Cosine()), STEPS, decoder)
