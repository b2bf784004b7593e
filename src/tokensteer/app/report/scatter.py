"""Scatter plots, whose labels avoid each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tokensteer.app.report.charts import Scale, brief, drawing, frame, key
from tokensteer.app.report.markup import text
from tokensteer.tasks.common.metrics import Measured

DOT, LETTER = (0.009, 0.025), (0.0135, 0.07)  # half a dot and a letter of a label, as shares of a scatter plot


@dataclass(frozen=True)
class Spot:
    """A point of a scatter plot; the errors are half-widths of 95% intervals."""

    name: str
    colour: int
    x: Measured
    y: Measured


def scatter(axes: tuple[str, str], spots: Sequence[Spot], way: Sequence[tuple[float, float]], note: str) -> str:
    """Points with their names and error bars, and a line through the `way`. All are kept where other charts show some
    methods only, since the line is that of all."""
    title = f"{axes[1]} against {axes[0]}"
    x = Scale.around([(spot.x.mean, spot.x.error) for spot in spots])
    y = Scale.around([(spot.y.mean, spot.y.error) for spot in spots])
    line = "L".join(f"{x.across(a):.0f} {y.up(b):.1f}" for a, b in way)
    drawn = f'{y.rules()}<path class="line c0 kept" d="M{line}"/>'
    entries: list[str] = []
    for spot in spots:
        a, b = spot.x.mean, spot.y.mean
        wide, tall = (e if math.isfinite(e) else 0.0 for e in (spot.x.error, spot.y.error))
        cross = f"M{x.across(a - wide):.0f} {y.up(b):.1f}H{x.across(a + wide):.0f}"
        cross += f"M{x.across(a):.0f} {y.up(b - tall):.1f}V{y.up(b + tall):.1f}"
        entries.append(f"{spot.name}: {brief(a)}, {brief(b)}")
        drawn += f'<path class="span c{spot.colour} kept" d="{cross}"/>'
        dot = f"M{x.across(a):.0f} {y.up(b):.1f}h0"
        drawn += f'<path class="dot c{spot.colour} kept" d="{dot}">{text("title", entries[-1])}</path>'
    places = label_places([(x.share(spot.x.mean), y.share(spot.y.mean), spot.name) for spot in spots])
    labels = "".join(
        text("span", spot.name, f'class="label {side} c{spot.colour} kept" style="left:{at[0]:.1%};bottom:{at[1]:.1%}"')
        for spot, (side, at) in zip(spots, places, strict=True)
        if side
    )
    names = key([(spot.name, spot.colour, "") for spot in spots], text("li", note, 'class="note kept"'), "kept")
    drawn, summary = drawing(drawn) + labels, f"{title}. {'; '.join(entries)}"
    return frame(escape(title), axes, summary, drawn, x.labels(), y.labels(), names)


Place = tuple[float, float]
"""Shares of the width and the height, from the left and from below."""


def label_places(spots: Sequence[tuple[float, float, str]]) -> list[tuple[str, Place]]:
    """The side of each (x, y, name) that its label stands on, and where it begins there. A label avoids dots and other
    labels; one without room has no side. Sizes are those of a chart of half the page; wider ones have more room."""
    dots = [(x - DOT[0], y - DOT[1], x + DOT[0], y + DOT[1]) for x, y, _ in spots]
    taken = list(dots)
    found: list[tuple[str, Place]] = []
    for k, (x, y, name) in enumerate(spots):
        wide, tall = LETTER[0] * len(name), LETTER[1]
        for side, low in (("right", y), ("left", y), ("right", y - tall), ("left", y - tall)):
            left = x + 1.5 * DOT[0] if side == "right" else x - 1.5 * DOT[0] - wide
            box = (left, low, left + wide, low + tall)
            if left >= 0 and box[2] <= 1 and not any(_overlap(box, t) for j, t in enumerate(taken) if j != k):
                taken.append(box)
                found.append((side, (x, low)))
                break
        else:
            found.append(("", (x, y)))
    return found


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
