"""SVG files as pixels, by resvg."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from tokensteer.tasks.common.png_reader import decode_png
from tokensteer.tasks.emoji.sources import Drawing

SIDE = 64
PAPER = "#ffffff"


def render(drawing: Drawing) -> Any:
    """The drawing on white, a uint8 array (SIDE, SIDE, 3)."""
    try:
        resvg: Any = import_module("resvg_py")
    except ImportError as error:
        raise ImportError("drawings are rendered by resvg: pip install 'tokensteer[emoji]'") from error
    content = resvg.svg_to_bytes(
        svg_string=drawing.svg, width=SIDE, height=SIDE, background=PAPER, skip_system_fonts=True
    )
    pixels = decode_png(bytes(content), f"{drawing.concept.name}, {drawing.style}")[:, :, :3]
    return np.ascontiguousarray(pixels[:, ::-1]) if drawing.mirrored else pixels
