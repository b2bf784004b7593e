"""Colour images in a table as one PNG: written by runs, and read back where draws are shown without networks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tokensteer.tasks.common.png import rgb_png, tiled, write_rgb_png
from tokensteer.tasks.common.png_reader import read_png

ZOOM = 2  # of the sheets in run folders
_FRAME = 128  # the grey between images, as a byte


def sheet(images: Tensor, columns: int, zoom: int = 1) -> Tensor:
    """Images (P, 3, H, W) of bytes in a table, (3, height, width) from 0 to 1."""
    return torch.stack([tiled(images[:, channel].float() / 255, columns, zoom) for channel in range(3)])


def write_sheet(file: str | Path, images: Tensor, columns: int, zoom: int = ZOOM) -> None:
    """Write images (P, 3, H, W) of bytes as a table."""
    write_rgb_png(file, sheet(images, columns, zoom))


def sheet_png(images: Tensor, columns: int) -> bytes:
    """The same without enlargement, as the content of a PNG file."""
    return rgb_png(sheet(images, columns))


def read_sheet(file: Path, side: int, zoom: int = ZOOM) -> tuple[Tensor, int]:
    """The images (P, 3, side, side) of a sheet, and its number of columns."""
    pixels = torch.as_tensor(read_png(file)).permute(2, 0, 1)
    each = (side + 1) * zoom
    rows, columns = ((size - zoom) // each for size in pixels.shape[1:])
    if len(pixels) != 3 or pixels.shape[1:] != (rows * each + zoom, columns * each + zoom) or not rows * columns:
        raise ValueError(f"{file} is damaged, it is no sheet of images of {side} x {side} pixels: run it again")
    cells = pixels[:, zoom:, zoom:].view(3, rows, each, columns, each).permute(1, 3, 0, 2, 4).flatten(0, 1)
    images = cells[:, :, : side * zoom : zoom, : side * zoom : zoom]
    blank = (images == _FRAME).flatten(1).all(1)
    return images[~blank].contiguous(), columns
