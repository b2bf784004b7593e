"""Changes of images that training learns from as well: mirrored, moved, in another light, partly hidden."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

SHIFT = 2  # pixels by which images are moved for autoencoders and denoisers
FURTHER = 4  # and for classifiers
HOLE = 4  # the side of an image in sides of the grey square
LIGHT = 0.2  # by which brightness and contrast vary


def augmented(images: Tensor, generator: Generator, shift: int = SHIFT, may_turn: Tensor | None = None) -> Tensor:
    """Images (P, C, H, W), each mirrored with probability 1/2, if it is one of those that `may_turn` (P,), and moved by
    up to `shift` pixels each way; pixels that come from outside mirror those inside."""
    rows, _, height, width = images.shape
    device = images.device
    move = torch.randint(-shift, shift + 1, (2, rows, 1), generator=generator, device=device)
    turn = torch.rand(rows, 1, generator=generator, device=device) < 0.5
    turn = turn if may_turn is None else turn & may_turn.unsqueeze(-1)
    y = _reflected(torch.arange(height, device=device) + move[0], height)
    x = _reflected(torch.arange(width, device=device) + move[1], width)
    x = torch.where(turn, x.flip(1), x)
    row = torch.arange(rows, device=device)[:, None, None]
    return images.permute(0, 2, 3, 1)[row, y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2)


def _reflected(place: Tensor, size: int) -> Tensor:
    """Places outside 0..size-1 mirrored at the border."""
    inside = place.abs()
    return torch.where(inside >= size, 2 * (size - 1) - inside, inside)


def distorted(images: Tensor, generator: Generator, may_turn: Tensor | None = None) -> Tensor:
    """Images (P, 3, H, W) in [0, 1] mirrored, moved, in another light, and with a grey square."""
    rows, _, height, width = images.shape
    device = images.device
    images = augmented(images, generator, min(FURTHER, height // 4), may_turn)
    light = 1 + LIGHT * (2 * torch.rand(2, rows, 1, 1, 1, generator=generator, device=device) - 1)
    images = (images - 0.5) * light[0] + 0.5 * light[1]
    hole = max(1, height // HOLE)
    top, left = (torch.randint(size, (rows, 1), generator=generator, device=device) for size in (height, width))
    y, x = (torch.arange(size, device=device) for size in (height, width))
    inside = ((y - top).abs() <= hole // 2)[:, None, :, None] & ((x - left).abs() <= hole // 2)[:, None, None, :]
    return torch.where(inside, 0.5, images)
