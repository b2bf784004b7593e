"""PNG files, written with the standard library alone."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tokensteer import files


def write_png(file: str | Path, picture: Tensor) -> None:
    """A grey picture (H, W), 0 for black and 1 for white."""
    files.write_bytes(file, _png(picture, GREY))


def write_rgb_png(file: str | Path, picture: Tensor) -> None:
    """A colour picture (3, H, W) from 0 to 1."""
    files.write_bytes(file, rgb_png(picture))


def rgb_png(picture: Tensor) -> bytes:
    """A colour picture (3, H, W) from 0 to 1."""
    return _png(picture, RGB)


def shaded_png(picture: Tensor, colour: tuple[int, int, int]) -> bytes:
    """A picture (H, W) in one colour, 0 for transparent and 1 for opaque."""
    return _png(picture, PALETTE, (b"PLTE", bytes(colour) * 256), (b"tRNS", bytes(range(256))))


def write_coloured_png(file: str | Path, picture: Tensor, colours: Sequence[tuple[int, int, int]]) -> None:
    """A picture (H, W) of indices into `colours`."""
    files.write_bytes(file, _png(picture / 255, PALETTE, (b"PLTE", b"".join(map(bytes, colours)))))


GREY, RGB, PALETTE = 0, 2, 3  # the colour types of PNG


def _png(picture: Tensor, kind: int, *palette: tuple[bytes, bytes]) -> bytes:
    height, width = picture.shape[-2:]
    values = (picture.clamp(0, 1) * 255).round().to("cpu", torch.uint8)
    if kind == RGB:
        values = values.permute(1, 2, 0).reshape(height, 3 * width)
    lines = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), values], 1)  # each line has its filter type, 0, first
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    body = zlib.compress(lines.numpy().tobytes(), 9)
    chunks = [(b"IHDR", header), *palette, (b"IDAT", body), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, content) for name, content in chunks)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def tiled(images: Tensor, columns: int, zoom: int) -> Tensor:
    """Images (P, H, W) in a table on grey, each site `zoom` pixels wide."""
    big = images.float().cpu().repeat_interleave(zoom, 1).repeat_interleave(zoom, 2)
    framed = torch.nn.functional.pad(big, (0, zoom, 0, zoom), value=0.5)
    missing = -len(framed) % columns
    framed = torch.cat([framed, torch.full((missing, *framed.shape[1:]), 0.5)])
    count, height, width = framed.shape
    sheet = framed.view(count // columns, columns, height, width).transpose(1, 2).reshape(-1, columns * width)
    return torch.nn.functional.pad(sheet, (zoom, 0, zoom, 0), value=0.5)
