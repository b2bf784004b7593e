"""Whether a run is being recorded as a CUDA graph (`replay`), when the host may not look at what is on the device."""

from __future__ import annotations

import torch


def capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
