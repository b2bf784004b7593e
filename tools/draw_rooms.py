"""Draw the rooms of the package and the imports between them, from the imports of the source.

`python tools/draw_rooms.py` writes docs/images/rooms.svg. A room is a package of `core`, or a package beside it. Arrows
lead to rooms on the next floor; imports from floors further down are allowed and not drawn.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tokensteer"
FILE = ROOT / "docs" / "images" / "rooms.svg"

FLOORS = [
    ["app"],
    ["tasks"],
    ["testing", "adapters", "rewards", "train", "workers"],
    ["core.steering"],
    ["core.proposals"],
    ["core.twists"],
    ["core.models"],
    ["core.kernels"],
    ["core.particles", "core.categorical"],
    ["core.numerics"],
]
HOLDS = {
    "app": "command line, run folders, report",
    "tasks": "mog, product, images, text, dna, cifar, emoji, quality",
    "testing": "exact answers, laws",
    "adapters": "foreign networks",
    "rewards": "text, DNA, constraints",
    "train": "proposals, twists, DRAKES",
    "workers": "units, pools, Ray",
    "core.steering": "Steering, methods, planner, CUDA graphs",
    "core.proposals": "model, guided, gradient, amortised, enumerated",
    "core.twists": "Tilt, estimators, potentials, ramps, gradients",
    "core.models": "denoisers, predictions, Diffusion, Product",
    "core.kernels": "schedules, measures, every reverse process",
    "core.particles": "SMC loop, resampling, results",
    "core.categorical": "distributions, made fast",
    "core.numerics": "draws, rows, batching",
}
LEVEL = {room: y for y, floor in enumerate(FLOORS) for room in floor}
WIDTH, FLOOR, HEIGHT = 900, 84, 46


def room_of(module: str) -> str | None:
    """The room of a dotted module below tokensteer, None for modules that are in no room."""
    parts = module.split(".")
    name = ".".join(parts[:2]) if parts[0] == "core" else parts[0]
    return name if name in HOLDS else None


def arrows() -> Counter[tuple[str, str]]:
    """How many modules of one room import from another."""
    found: Counter[tuple[str, str]] = Counter()
    for file in sorted(SOURCE.rglob("*.py")):
        module = ".".join(file.relative_to(SOURCE).with_suffix("").parts)
        here, there = room_of(module), set[str | None]()
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tokensteer"):
                base = node.module.removeprefix("tokensteer").lstrip(".")
                there |= {room_of(f"{base}.{alias.name}".lstrip(".")) for alias in node.names}
        found.update((here, other) for other in there if here and other and other != here)
    return found


def draw() -> str:
    place = {
        room: (WIDTH * (k + 0.5) / len(floor), 30 + FLOOR * y)
        for y, floor in enumerate(FLOORS)
        for k, room in enumerate(floor)
    }
    size = {room: min(330, WIDTH / len(floor) - 24) for floor in FLOORS for room in floor}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {FLOOR * len(FLOORS) + 10}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        "<title>The rooms of tokensteer. Arrows are imports, all of them downward.</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 Z" fill="#4a6fa5"/></marker></defs>',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for (upper, lower), count in sorted(arrows().items()):
        (x0, y0), (x1, y1) = place[upper], place[lower]
        if LEVEL[lower] - LEVEL[upper] > 1:
            continue
        start, end = y0 + HEIGHT / 2, y1 - HEIGHT / 2
        path = f"M{x0:.0f},{start:.0f} C{x0:.0f},{start + 30:.0f} {x1:.0f},{end - 30:.0f} {x1:.0f},{end - 5:.0f}"
        lines.append(
            f'<path d="{path}" fill="none" stroke="#4a6fa5" stroke-width="1.5" marker-end="url(#head)">'
            f"<title>{upper} → {lower}: {count} modules</title></path>"
        )
    for room, (x, y) in place.items():
        fill = "#eaf1fb" if room.startswith("core.") else "#f6f0e4"
        lines += [
            f'<rect x="{x - size[room] / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{size[room]:.0f}" height="{HEIGHT}" '
            f'rx="6" fill="{fill}" stroke="#4a6fa5"/>',
            f'<text x="{x:.0f}" y="{y - 3:.0f}" text-anchor="middle" font-weight="600">{room}</text>',
            f'<text x="{x:.0f}" y="{y + 14:.0f}" text-anchor="middle" fill="#555">{HOLDS[room]}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    upward = [f"{upper} → {lower}" for upper, lower in arrows() if LEVEL[upper] >= LEVEL[lower]]
    if upward:
        sys.exit(f"arrows that do not point downward: {', '.join(upward)}")
    FILE.write_text(draw(), "utf-8")
