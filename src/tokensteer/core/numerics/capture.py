"""Whether a CUDA graph is being captured, during which the host cannot read values from the device."""

from __future__ import annotations

import torch


def capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
