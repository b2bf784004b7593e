"""Seconds that methods take for an image, for several numbers of particles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Generator

import tokensteer as ts
from benchmarks.cifar_cells import add, finished, now
from tokensteer.core.steering.methods import Method
from tokensteer.tasks.common.training import say

ALONE = "pretrained"
"""The model alone, of which one particle makes an image."""
REPEATS = 3
"""The first run may load kernels, so the shortest counts."""


@dataclass(frozen=True)
class Cell:
    """A method with so many particles and steps, for so many `images` at once, a population for each. It may be
    `captured` as a CUDA graph."""

    method: str
    particles: int
    steps: int
    images: int = 1
    captured: bool = False

    @property
    def name(self) -> str:
        return f"{self.method}, captured" if self.captured else self.method

    def __str__(self) -> str:
        at_once = "" if self.images == 1 else f", {self.images} images at once"
        return f"{self.name}, N = {self.particles}, T = {self.steps}{at_once}"


def measure(cells: Sequence[Cell], make: Callable[[Cell], Method], device: torch.device, file: Path) -> None:
    """Time cells and append a line for each to a file, as soon as it is timed. All methods are made before the first is
    timed, so that errors come first."""
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    for cell, method in [(cell, make(cell)) for cell in cells]:
        runs = _seconds(cell, method, device)
        line = {**asdict(cell), "device": machine, "seconds": min(runs) / cell.images, "runs": runs}
        add(file, line)
        say(f"{cell}: {line['seconds']:.3g} s an image")


def _seconds(cell: Cell, method: Method, device: torch.device) -> list[float]:
    replay = ts.captured(method, cell.particles, cell.images) if cell.captured else None
    noise = Generator(device).manual_seed(0)

    def timed() -> float:
        began = now(device)
        if replay is None:
            method(cell.particles, cell.images, generator=noise)
        else:
            replay()
        return now(device) - began

    return [timed() for _ in range(REPEATS)]


Panel = tuple[str, dict[str, dict[int, float]]]
"""What its cells share, in words, and for each method its seconds by number of particles."""


def panels(file: Path) -> list[Panel]:
    """The seconds in a file for each device, number of steps and of images at once. Of cells that were timed twice the
    last one counts."""
    groups: dict[str, dict[str, dict[int, float]]] = {}
    for line in finished(file):
        if "method" not in line:  # of an earlier version
            continue
        cell = Cell(*(line[name] for name in ("method", "particles", "steps", "images", "captured")))
        at_once = "one image" if cell.images == 1 else f"{cell.images} images at once"
        words = f"T = {cell.steps}, {at_once}, {line['device']}"
        groups.setdefault(words, {}).setdefault(cell.name, {})[cell.particles] = line["seconds"]
    if not groups:
        raise ValueError(f"{file} has no seconds: write them by python -m benchmarks.emoji cost")
    return [
        (words, {name: dict(sorted(some.items())) for name, some in found.items()}) for words, found in groups.items()
    ]
