"""Templates: a canvas of masks with fixed tokens, and batches of templates of different lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokensteer.core.numerics.domains import check_whole


def template(length: int, mask_id: int, tokens: Sequence[int] = (), *, at: Sequence[int] | None = None) -> Tensor:
    """A canvas of masks with `tokens` fixed at the sites `at` (by default a prompt at the start), (length,)."""
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

    Padding is fixed like a prompt, so no particle ever moves there; the networks are to look past it, and tell it by
    its id.
    """
    if not templates or not all(isinstance(canvas, Tensor) and canvas.dim() == 1 for canvas in templates):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError("padded: give one or more templates, each a tensor of ids (L,), such as template(...) makes")
    if any((canvas == pad_id).any() for canvas in templates):
        raise ValueError(f"padded: a template holds {pad_id}, the padding itself: choose an id that nothing else has")
    return torch.nn.utils.rnn.pad_sequence(list(templates), batch_first=True, padding_value=pad_id)
