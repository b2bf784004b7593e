"""Networks of `cifar` with random weights: the true classes, narrow and with few codes."""

from __future__ import annotations

from pathlib import Path

import torch

from tokensteer.tasks import nets
from tokensteer.tasks.cifar.model import Networks
from tokensteer.tasks.nets.store import build

SIDE = 32


def networks(side: int = SIDE, seed: int = 0, levels: tuple[int, ...] = (3, 3)) -> Networks:
    """All four. The denoiser's tables of classes, zero before training, are random, so that classes differ."""
    torch.manual_seed(seed)
    half = side // 2
    codes = nets.FSQConfig(side, levels, (8, 8), (1, 1), (8, 8), (1, 1))
    size = codes.num_codes + 1
    tokeniser = build(codes)
    denoiser = build(nets.GridTransformerConfig(size, half, half, hidden=16, depth=1, heads=2, num_classes=10))
    for name, weight in denoiser.named_parameters():
        if "modulation" in name or name == "tokens.weight":
            torch.nn.init.normal_(weight)
    reward, judge = build(nets.ResNetConfig(side, 10, (8, 16), 1)), build(nets.MixerConfig(side, 10, 16, 2, 3))
    assert isinstance(tokeniser, nets.FSQ)
    assert isinstance(denoiser, nets.GridTransformer)
    made = (tokeniser, denoiser, reward, judge)
    return Networks(*(net.eval().requires_grad_(False) for net in made))  # type: ignore[arg-type]


def save(folder: Path) -> Path:
    """A folder of weights as training writes it."""
    made = networks()
    for role in ("tokeniser", "denoiser", "reward", "judge"):
        nets.save(getattr(made, role), folder / f"cifar-{role}.safetensors")
    return folder
