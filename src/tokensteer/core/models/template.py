"""Templates: masks with some fixed tokens, and batches of templates of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from tokensteer.core.numerics.domains import check_whole


def template(length: int, mask_id: int, tokens: Sequence[int] = (), *, at: Sequence[int] | None = None) -> Tensor:
    """Masks with `tokens` fixed at the sites `at`, by default a prompt at the start, (length,)."""
    check_whole("template: length", length)
    check_whole("template: mask_id", mask_id, -1)
    sites = list(range(len(tokens)) if at is None else at)
    if len(sites) != len(tokens):
        raise ValueError(f"template: {len(tokens)} tokens for {len(sites)} sites; give one site for each token")
    if sites and not (0 <= min(sites) and max(sites) < length):
        raise ValueError(
            f"template: site {max(sites)} is outside a canvas of length {length}: shorten the prompt or give the model "
            "a longer canvas"
        )
    canvas = torch.full((length,), mask_id)
    canvas[sites] = torch.tensor(list(tokens), dtype=canvas.dtype)
    return canvas


def padded(templates: Sequence[Tensor], pad_id: int) -> Tensor:
    """Templates of different lengths as one (B, L), with `pad_id` at the end of the shorter ones.

    Padding is fixed like a prompt; the networks must ignore sites that hold `pad_id`.
    """
    given = cast("Sequence[object]", templates)
    if not given or not all(isinstance(canvas, Tensor) and canvas.dim() == 1 for canvas in given):
        raise ValueError("padded: give one or more templates, each a tensor of ids (L,), as template(...) returns")
    if any((canvas == pad_id).any() for canvas in templates):
        raise ValueError(f"padded: a template holds {pad_id}, the padding itself: choose another pad_id")
    return torch.nn.utils.rnn.pad_sequence(list(templates), batch_first=True, padding_value=pad_id)
