"""Reading of PNG files of 8 bits per channel, with zlib and numpy alone.

Each line of a PNG is stored as differences from a prediction, one of five for the whole line: nothing, the pixel to the
left, the one above, the mean of the two, or Paeth's choice between left, above and upper left. A pixel depends on
pixels of earlier anti-diagonals x + y alone, so the differences of one anti-diagonal are undone at once: height + width
operations on arrays instead of one for each pixel.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}  # grey, RGB, grey with alpha, RGBA, by PNG's colour type
_LEFT, _UP, _MEAN, _PAETH = 1, 2, 3, 4
_where: Any = np.where


def read_png(file: Path) -> Any:
    """The pixels of a PNG, a uint8 array (height, width, channels). Raises ValueError naming the file if it is damaged,
    interlaced, has a palette or has not 8 bits per channel."""
    return decode_png(file.read_bytes(), str(file))


def decode_png(content: bytes, file: str) -> Any:
    """`read_png` of the content of a file; errors call it `file`."""
    try:
        (width, height, depth, kind, _, _, interlaced), packed = _chunks(content)
        if depth != 8 or kind not in CHANNELS or interlaced:
            raise ValueError("only 8 bits of grey or RGB, with or without alpha and not interlaced, can be read")
        lines = np.frombuffer(zlib.decompress(packed), np.uint8)
        channels = CHANNELS[kind]
        if lines.size != height * (1 + width * channels):
            raise ValueError(f"it holds {lines.size} bytes of pixels, not {height * (1 + width * channels)}")
        lines = lines.reshape(height, 1 + width * channels)
        if lines[:, 0].max(initial=0) > _PAETH:
            raise ValueError(f"there is no filter {lines[:, 0].max()}")
    except (ValueError, zlib.error, struct.error) as error:
        raise ValueError(f"{file} is damaged, or no PNG that can be read ({error})") from error
    return undo_filters(lines[:, 1:].reshape(height, width, channels), lines[:, 0])


def _chunks(content: bytes) -> tuple[tuple[int, ...], bytes]:
    """The numbers of the header, and the compressed lines."""
    if not content.startswith(SIGNATURE):
        raise ValueError("it does not begin as a PNG")
    header: tuple[int, ...] | None = None
    packed: list[bytes] = []
    place = len(SIGNATURE)
    while place < len(content):
        length, name = struct.unpack_from(">I4s", content, place)
        body = content[place + 8 : place + 8 + length]
        (checksum,) = struct.unpack_from(">I", content, place + 8 + length)
        if checksum != zlib.crc32(name + body):
            raise ValueError(f"the checksum of {name!r} is wrong")
        if name == b"IHDR":
            header = struct.unpack(">IIBBBBB", body)
        elif name == b"IDAT":
            packed.append(body)
        place += 12 + length
    if header is None or not packed:
        raise ValueError("it has no header or no pixels")
    return header, b"".join(packed)


def undo_filters(lines: Any, filters: Any) -> Any:
    """Pixels of filtered lines (height, width, channels), each with its filter (height,) from 0 to 4."""
    height, width, channels = lines.shape
    wide = width + 1  # a column of zeros on the left and a line of zeros above, from which the first pixels differ
    pixels = np.zeros(((height + 1) * wide, channels), np.int16)
    stored = lines.reshape(-1, channels).astype(np.int16)
    kinds = filters[:, None]
    for diagonal in range(height + width - 1):
        first, last = max(0, diagonal - width + 1), min(height - 1, diagonal)  # lines that the anti-diagonal crosses
        count = last - first + 1
        x = diagonal - first

        def along(table: Any, line: int, column: int, width: int, count: int = count) -> Any:
            """Entries (line, column), (line + 1, column - 1), ..., of a table of that width."""
            start = line * width + column
            return table[start : start + (count - 1) * (width - 1) + 1 : max(1, width - 1)]

        left, up = along(pixels, first + 1, x, wide), along(pixels, first, x + 1, wide)
        found = _predicted(kinds[first : last + 1], left, up, along(pixels, first, x, wide))
        found += along(stored, first, x, width)
        along(pixels, first + 1, x + 1, wide)[:] = found & 255
    return pixels.reshape(height + 1, wide, channels)[1:, 1:].astype(np.uint8)


def _predicted(kinds: Any, left: Any, up: Any, corner: Any) -> Any:
    """What each filter predicts from the three neighbours."""
    by_left, by_up, by_corner = np.abs(up - corner), np.abs(left - corner), np.abs(left + up - 2 * corner)
    nearest = _where(by_up <= by_corner, up, corner)
    paeth = _where((by_left <= by_up) & (by_left <= by_corner), left, nearest)  # ties: left, then up
    found = _where(kinds == _PAETH, paeth, 0)
    found = _where(kinds == _LEFT, left, found)
    found = _where(kinds == _UP, up, found)
    return _where(kinds == _MEAN, (left + up) >> 1, found)
