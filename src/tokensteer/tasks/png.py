"""Grey pictures as PNG files, with nothing but the standard library."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor


def write_png(file: Path, picture: Tensor) -> None:
    """A picture (H, W) of numbers from 0 (black) to 1 (white)."""
    height, width = picture.shape
    grey = (picture.clamp(0, 1) * 255).round().to("cpu", torch.uint8)
    lines = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), grey], 1)  # each line begins with its filter, none

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = zlib.compress(lines.numpy().tobytes(), 9)
    parts = [b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", header), chunk(b"IDAT", body), chunk(b"IEND", b"")]
    file.write_bytes(b"".join(parts))


def tiled(images: Tensor, columns: int, zoom: int) -> Tensor:
    """Images (P, H, W) side by side on grey, each site `zoom` pixels wide."""
    big = images.float().cpu().repeat_interleave(zoom, 1).repeat_interleave(zoom, 2)
    framed = torch.nn.functional.pad(big, (0, zoom, 0, zoom), value=0.5)
    missing = -len(framed) % columns
    framed = torch.cat([framed, torch.full((missing, *framed.shape[1:]), 0.5)])
    count, height, width = framed.shape
    sheet = framed.view(count // columns, columns, height, width).transpose(1, 2).reshape(-1, columns * width)
    return torch.nn.functional.pad(sheet, (zoom, 0, zoom, 0), value=0.5)
