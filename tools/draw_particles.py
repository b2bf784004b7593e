"""Draw docs/images/particles.svg, the moving picture of the README: particles of `digits` as they are steered.

    python tools/draw_particles.py

A run of SMC towards a 7 with the shipped networks. Grey pixels are still masked. The bar below a particle is its
weight; where particles are resampled, the copies of heavier ones are framed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

import tokensteer as ts
from tokensteer.files import write_text

FILE = Path(__file__).parents[1] / "docs" / "images" / "particles.svg"
GOAL, SEED, PARTICLES, STEPS, SIDE, MASK = 7, 5, 8, 24, 8, 2
PIXEL, GAP, SECONDS, STILL = 9, 14, 0.35, 5  # the last frame stays for STILL frames more
INK, GREY, FRAME, BAR = "#1f2937", "#d1d5db", "#dc6803", "#2563eb"
TILE = SIDE * PIXEL


@dataclass(frozen=True)
class Moment:
    """The particles (N, L) at one time, their weights (N,), and which of them are copies of another, (N,)."""

    x: torch.Tensor
    weights: torch.Tensor
    copies: torch.Tensor


def run() -> list[Moment]:
    task = ts.load("digits", goal=GOAL, steps=STEPS)
    seen = list[Moment]()

    def watch(record: ts.Record) -> None:
        own = torch.arange(PARTICLES)
        seen.append(Moment(record.x[0], record.log_w[0].softmax(-1), record.ancestors[0] != own))

    method = ts.smc_grad(task.model, task.tilt)
    method(PARTICLES, generator=torch.Generator().manual_seed(SEED), on_step=watch)
    return seen


def draw(moments: list[Moment]) -> str:
    width, height = PARTICLES * (TILE + GAP) + GAP, TILE + 4 * GAP
    frames = len(moments) + STILL
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="Particles of handwritten digits are unmasked step by step and resampled, towards a {GOAL}">',
        f"<style>g.f{{visibility:hidden;animation:f {frames * SECONDS:g}s step-end infinite}}"
        f"@keyframes f{{0%{{visibility:visible}}{100 / frames:.4f}%{{visibility:hidden}}}}"
        f"g.f:last-of-type{{animation-name:l}}@keyframes l{{0%{{visibility:visible}}"
        f"{100 * (STILL + 1) / frames:.4f}%{{visibility:hidden}}}}"
        f"@media(prefers-reduced-motion:reduce){{g.f{{animation:none}}g.f:last-of-type{{visibility:visible}}}}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#fff"/>',
    ]
    for k, moment in enumerate(moments):
        done = f"step {k} of {len(moments) - 1}"
        resampled = ", resampled" if bool(moment.copies.any()) else ""
        parts.append(f'<g class="f" style="animation-delay:{k * SECONDS:g}s">')
        parts.append(
            f'<text x="{GAP}" y="{height - GAP * 0.6:g}" font-family="sans-serif" font-size="12" fill="{INK}">'
            f"{done}{resampled}</text>"
        )
        parts += [_tile(moment, i) for i in range(PARTICLES)]
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _tile(moment: Moment, i: int) -> str:
    left, top = GAP + i * (TILE + GAP), GAP
    x = moment.x[i].view(SIDE, SIDE)
    frame = FRAME if bool(moment.copies[i]) else "#e5e7eb"
    bar = max(1.0, TILE * float(moment.weights[i] / moment.weights.max()))
    return (
        f'<g transform="translate({left} {top})"><rect x="-2" y="-2" width="{TILE + 4}" height="{TILE + 4}" '
        f'fill="none" stroke="{frame}" stroke-width="2"/><path fill="{GREY}" d="{_squares(x == MASK)}"/>'
        f'<path fill="{INK}" d="{_squares(x == 1)}"/>'
        f'<rect y="{TILE + 7}" width="{bar:.1f}" height="5" fill="{BAR}"/></g>'
    )


def _squares(marked: torch.Tensor) -> str:
    """Runs of marked pixels in each row, as one path."""
    found = list[str]()
    for y, row in enumerate(marked.tolist()):
        start = None
        for x, on in enumerate([*row, False]):
            if on and start is None:
                start = x
            elif not on and start is not None:
                found.append(f"M{start * PIXEL} {y * PIXEL}h{(x - start) * PIXEL}v{PIXEL}h-{(x - start) * PIXEL}z")
                start = None
    return "".join(found)


if __name__ == "__main__":
    write_text(FILE, draw(run()))
