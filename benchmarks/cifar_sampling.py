"""What the networks of `cifar` are enough for, without images or published networks: sheets of samples, and cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import tokensteer as ts
from benchmarks.cifar_cells import MDM, REMDM, Cell, Drawn, add, device_name, drawn_images, method_of, now
from tokensteer.tasks.cifar.data import CLASSES
from tokensteer.tasks.cifar.model import Networks
from tokensteer.tasks.common.sheets import write_sheet

Answer = TypeVar("Answer")

COLUMNS = 8
PARTICLES = 16  # in each population of a steered step
GREY = 128


def write_gallery(
    cells: Sequence[Cell], networks: Networks, folder: Path, at_once: int, captured: bool
) -> Iterator[Path]:
    """A sheet for each cell, a line of eight images for each class. Neighbours of the same guidance are also shown
    beside each other, on one sheet."""
    before: tuple[Cell, Tensor] | None = None
    for cell in cells:
        images, name = by_class(cell, networks, at_once, captured), f"{cell.kernel}-a{cell.guidance:g}-t{cell.steps}"
        yield _written(folder / f"samples-{name}-n{cell.particles}.png", images)
        if before is not None and before[0].guidance == cell.guidance:
            between = torch.full_like(images[:, :1], GREY)
            file = folder / f"samples-{name}-n{before[0].particles}-beside-n{cell.particles}.png"
            yield _written(file, torch.cat([before[1], between, images], 1))
        before = cell, images


def by_class(cell: Cell, networks: Networks, at_once: int, captured: bool) -> Tensor:
    """Images (10, 8, 3, H, W) of a cell, each drawn by weight from a population of its own."""
    cell = replace(cell, images=COLUMNS * len(CLASSES))
    images = torch.cat([part for part, _ in drawn_images(cell, networks, Drawn(), at_once, captured)])
    return images.view(COLUMNS, len(CLASSES), *images.shape[1:]).transpose(0, 1)


def _written(file: Path, images: Tensor) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_sheet(file, images.flatten(0, 1), images.shape[1])
    return file


def cost(cell: Cell, networks: Networks, file: Path, at_once: int, tries: int = 5) -> Iterator[str]:
    """Seconds for at most 1,000 images of one particle, and a steered step in forward passes of both networks, without
    and with remasking, each with how often the networks predict a particle in a step, less where particles share a
    prediction. On a GPU all are also replayed as CUDA graphs."""
    yield from _cost_of_images(cell, networks, file)
    for kernel in (MDM, REMDM):
        yield _cost_of_step(replace(cell, particles=PARTICLES, kernel=kernel), networks, file, at_once, tries)


def _cost_of_images(cell: Cell, networks: Networks, file: Path) -> Iterator[str]:
    device = networks.device
    cell = replace(cell, images=min(1000, cell.images))
    for captured in (False, True) if device.type == "cuda" else (False,):
        drawn, whole = Drawn(), 0.0
        for _ in range(2):  # the first run is to warm up
            drawn, began = Drawn(), now(device)
            for _part in drawn_images(cell, networks, drawn, cell.images, captured):
                pass
            whole = now(device) - began
        line = {"name": "images", "captured": captured, "images": cell.images, **asdict(drawn)}
        add(file, {**line, "device": device_name(device)})
        yield (
            f"{cell.images} images, T = {cell.steps}, N = 1{', captured' if captured else ''}: {drawn.seconds:.2f} s "
            f"of sampling, {whole:.2f} s with decoding and capture"
        )


def _cost_of_step(cell: Cell, networks: Networks, file: Path, at_once: int, tries: int) -> str:
    device, particles = networks.device, cell.particles
    populations = max(1, at_once // (particles * len(CLASSES))) * len(CLASSES)
    rows = particles * populations
    x = torch.randint(networks.mask, (rows, networks.denoiser.config.length), device=device)
    labels = torch.arange(rows, device=device) % len(CLASSES)
    method = method_of(cell, networks, list(range(len(CLASSES))))
    passes, _ = _least(lambda: [networks.logits(x, labels) for _ in range(2)], device, tries)
    ways: dict[str, Callable[[], ts.Result]] = {"eager": lambda: method(particles, populations)}
    if device.type == "cuda":
        ways["captured"] = ts.captured(method, particles, populations)
    line: dict[str, Any] = {"name": f"step, {cell.kernel}", "passes": passes, "rows": rows}
    said: list[str] = []
    for way, run in ways.items():
        seconds, result = _least(run, device, tries)
        predicted = result.rows["denoiser"] / (2 * cell.steps * rows)
        line |= {way: seconds / cell.steps, f"{way} predictions": predicted}
        said.append(
            f"{way} {seconds / cell.steps / passes:.2f} times the two networks, which predict {predicted:.3g} times"
        )
    add(file, {**line, "device": device_name(device)})
    return f"A step, {cell.kernel}, {rows:,} particles, {5e5 * passes / rows:.1f} µs a row: {'; '.join(said)}"


def _least(run: Callable[[], Answer], device: torch.device, tries: int) -> tuple[float, Answer]:
    """The least seconds of a few calls, after one to warm up that gives the answer."""
    with torch.no_grad():
        answer = run()
        seconds = float("inf")
        for _ in range(tries):
            began = now(device)
            run()
            seconds = min(seconds, now(device) - began)
    return seconds, answer
