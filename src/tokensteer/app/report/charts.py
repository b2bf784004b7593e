"""Line charts, point charts, histograms and bars.

A chart is an SVG drawing that stretches with its box, with HTML labels around it: text keeps the size of the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tokensteer.app.report.markup import data, element, text
from tokensteer.app.words.numbers import fixed

BANDS = 6  # of more lines than this, bands are not shown together: they would hide the lines
WIDTH, HEIGHT = 1000, 400  # of the drawing, in SVG units


@dataclass(frozen=True)
class Line:
    """A series: its mean and the half-width of its band or error bar, a 95% interval; NaN where unknown."""

    name: str
    colour: int
    mean: Sequence[float]
    band: Sequence[float]


@dataclass(frozen=True)
class Scale:
    """A linear axis from `low` to `high`."""

    low: float
    high: float
    about: int = 4
    """Roughly how many intervals the ticks make."""

    @classmethod
    def around(cls, values: Sequence[tuple[float, float]]) -> Scale:
        """An axis that holds all (mean, half-width) pairs with some room at both ends; NaN half-widths count as 0."""
        ends = [mean + side * (half if math.isfinite(half) else 0.0) for mean, half in values for side in (-1, 1)]
        low, high = min(ends), max(ends)
        room = 0.04 * (high - low) or max(0.5, 1e-6 * abs(low))
        return cls(low - room, high + room)

    def share(self, value: float) -> float:
        """The place of a value, 0 at `low` and 1 at `high`."""
        return (value - self.low) / (self.high - self.low)

    def across(self, value: float) -> float:
        return WIDTH * self.share(value)

    def up(self, value: float) -> float:
        """The y-coordinate in the drawing, where y points down. Values outside of the axis are clamped."""
        return HEIGHT * (1.0 - self.share(min(max(value, self.low), self.high)))

    def marks(self) -> list[float]:
        return [v for v in ticks(self.low, self.high, self.about) if self.low - 1e-9 <= v <= self.high + 1e-9]

    def labels(self) -> list[tuple[float, str]]:
        """Place and text of each tick; all have the same number of decimals."""
        marks = self.marks()
        places = next((p for p in range(7) if all(abs(round(v, p) - v) < 1e-9 for v in marks)), 3)
        return [(self.share(v), fixed(v, places)) for v in marks]

    def rules(self) -> str:
        """Horizontal lines at the ticks."""
        return "".join(f'<path class="rule" d="M0 {self.up(v):.0f}H{WIDTH}"/>' for v in self.marks())


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    raw = (high - low) / about
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(k * size for k in (1, 2, 2.5, 5, 10) if k * size >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [k * step for k in range(first, last + 1)]


Labels = Sequence[tuple[float, str]]
"""Texts, each at a place from 0 to 1."""


def frame(title: str, axes: tuple[str, str], summary: str, drawing: str, x: Labels, y: Labels, extra: str) -> str:
    """A chart with the names of its `axes` and its labels, y upwards. `title` is markup; `summary` is the text for
    screen readers."""
    y_labels = "".join(text("span", label, f'style="bottom:{at:.2%}"') for at, label in y)
    body = element("div", 'class="y" aria-hidden="true"', y_labels) + element("div", 'class="plot"', drawing)
    named = text("p", axes[1], 'class="axis" aria-hidden="true"') if axes[1] else ""
    label = f'class="chart" role="img" aria-label="{escape(summary)}"'
    picture = element("div", label, body, x_axis(x, axes[0]))
    return element("figure", 'class="one"', element("figcaption", "", title), named, picture, extra)


def x_axis(labels: Labels, name: str) -> str:
    """Labels below a drawing, and the name of the axis. The first and the last are aligned so that they stay inside."""
    edges = ["first" if at < 0.03 else "last" if at > 0.97 else "mid" for at, _ in labels]
    places = [f'class="{edge}" style="left:{at:.2%}"' for edge, (at, _) in zip(edges, labels, strict=True)]
    spans = [text("span", label, place) for (_, label), place in zip(labels, places, strict=True)]
    named = text("p", name, 'class="axis x-name" aria-hidden="true"')
    return element("div", 'class="x" aria-hidden="true"', *spans) + named


def step_labels(steps: int) -> list[tuple[float, str]]:
    """Labels of an x-axis from step 0 to the last."""
    if not steps:
        return [(0.0, "0")]
    marks = [int(v) for v in ticks(0, steps) if v <= 0.93 * steps and v == int(v)]
    return [(k / steps, str(k)) for k in (*marks, steps)]


def drawing(content: str, width: int = WIDTH, height: int = HEIGHT, attributes: str = "") -> str:
    box = f'viewBox="0 0 {width} {height}" preserveAspectRatio="none" aria-hidden="true" {attributes}'
    return element("svg", box, content)


def key(entries: Sequence[tuple[str, int, str]], after: str = "", kind: str = "") -> str:
    """Names with their colours, each followed by markup, and something after all of them; `kind` is their class."""
    items = [
        element(
            "li",
            f'class="{kind}"' if kind else "",
            element("button", 'type="button" aria-pressed="false"', swatch(colour), escape(name)),
            more,
        )
        for name, colour, more in entries
    ]
    return element("ul", 'class="key"', *items, after)


def swatch(colour: int) -> str:
    return f'<i class="swatch c{colour}" aria-hidden="true"></i>'


def brief(value: float) -> str:
    """Two decimals, fewer for large numbers and one more for small ones."""
    size = abs(value)
    return fixed(value, 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 or not value else 3)


def line_chart(title: str, lines: Sequence[Line], span: tuple[float, float] | None = None, first: bool = False) -> str:
    """One line for each series from the first step to the last. `span` fixes the y-axis, otherwise the data do.

    The key shows the value of each line at the last step, or with `first` at the first.
    """
    lines = [line for line in lines if _points(line)]
    if not lines:
        return ""
    steps = max(len(line.mean) for line in lines) - 1
    scale = Scale(*span) if span else Scale.around([(m, b) for line in lines for _, m, b in _points(line)])
    drawn = "".join(_band(line, scale) for line in lines) + "".join(_stroke(line, scale) for line in lines)
    series = [[round(v, 4) if math.isfinite(v) else None for v in line.mean] for line in lines]
    content = scale.rules() + drawn + '<path class="cursor" d="" hidden=""/>'
    many = " many" if len(lines) > BANDS else ""
    svg = drawing(content, attributes=f'class="trace{many}" data-series="{data(series)}"')
    when = "at the first step" if first else "at the last step"
    ends = [(line, brief(_points(line)[0 if first else -1][1])) for line in lines]
    summary = f"{title}, {when}: " + ", ".join(f"{line.name} {end}" for line, end in ends)
    entries = [(line.name, line.colour, " " + text("b", end, 'class="value"')) for line, end in ends]
    below = key(entries, text("li", when, 'class="at"'))
    return frame(escape(title), ("step", ""), summary, svg, step_labels(steps), scale.labels(), below)


def _points(line: Line) -> list[tuple[float, float, float]]:
    """x-coordinate, mean and band wherever the mean is known."""
    steps = max(len(line.mean) - 1, 1)
    values = enumerate(zip(line.mean, line.band, strict=True))
    return [(WIDTH * k / steps, mean, band) for k, (mean, band) in values if math.isfinite(mean)]


def _band(line: Line, scale: Scale) -> str:
    known = [(x, m, b) for x, m, b in _points(line) if math.isfinite(b)]
    if len(known) < 2:
        return ""
    edge = [f"{x:.0f} {scale.up(m + b):.0f}" for x, m, b in known]
    edge += [f"{x:.0f} {scale.up(m - b):.0f}" for x, m, b in reversed(known)]
    return f'<path class="band c{line.colour}" d="M{"L".join(edge)}z"/>'


def _stroke(line: Line, scale: Scale) -> str:
    known = [f"{x:.0f} {scale.up(m):.1f}" for x, m, _ in _points(line)]
    if len(known) == 1:  # a single value is a dot
        return f'<path class="dot c{line.colour}" d="M{known[0]}h0"/>'
    return f'<path class="line c{line.colour}" d="M{"L".join(known)}"/>'


def point_chart(axes: tuple[str, str], lines: Sequence[Line], labels: Sequence[str]) -> str:
    """One line for each series over a few values at equal distances, with error bars."""
    title = f"{axes[1]} against {axes[0]}"
    places = [(k + 0.5) / len(labels) for k in range(len(labels))]
    known = [
        [point for point in zip(places, line.mean, line.band, labels, strict=True) if math.isfinite(point[1])]
        for line in lines
    ]
    if not any(known):
        return ""
    scale = Scale.around([(mean, band) for points in known for _, mean, band, _ in points])
    drawn = scale.rules()
    for line, points in zip(lines, known, strict=True):
        at = [f"{WIDTH * place:.0f} {scale.up(mean):.1f}" for place, mean, _, _ in points]
        bars = [
            f"M{WIDTH * place:.0f} {scale.up(mean - band):.1f}V{scale.up(mean + band):.1f}"
            for place, mean, band, _ in points
            if math.isfinite(band)
        ]
        for kind, d in (("line", "M" + "L".join(at)), ("span", "".join(bars)), ("dot", "".join(f"M{p}h0" for p in at))):
            drawn += f'<path class="{kind} c{line.colour}" d="{d}"/>'
    said = [", ".join(f"{brief(mean)} at {label}" for _, mean, _, label in points) for points in known]
    summary = f"{title}. " + "; ".join(f"{line.name}: {words}" for line, words in zip(lines, said, strict=True))
    x = list(zip(places, labels, strict=True))
    below = key([(p.name, p.colour, "") for p in lines])
    return frame(escape(title), axes, summary, drawing(drawn), x, scale.labels(), below)


def histogram(
    title: str, colour: int, shares: Sequence[float], labels: Sequence[str], top: float, marked: Sequence[str]
) -> str:
    """Shares of particles by weight, as bars from 0 to `top`; labels that are `marked` stand below the chart."""
    wide, scale = WIDTH / len(shares), Scale(0.0, top, about=2)
    bars = "".join(
        f'<rect class="bar c{colour}" x="{k * wide + 0.08 * wide:.0f}" y="{scale.up(share):.0f}" '
        f'width="{0.84 * wide:.0f}" height="{HEIGHT * share / top:.0f}"><title>{escape(label)}: '
        f"{share:.0%}</title></rect>"
        for k, (share, label) in enumerate(zip(shares, labels, strict=True))
        if share > 0
    )
    most = max(range(len(shares)), key=shares.__getitem__)
    summary = f"{title}: share of particles by N times their weight. Most often {labels[most]}, {shares[most]:.0%}"
    x = [((k + 0.5) / len(shares), label) for k, label in enumerate(labels) if label in marked]
    y = [(scale.share(v), f"{v:.0%}") for v in scale.marks()]
    axes, drawn = ("N · weight", "share of particles"), drawing(scale.rules() + bars)
    return frame(swatch(colour) + escape(title), axes, summary, drawn, x, y, "")


def bars(title: str, rows: Sequence[tuple[str, int, float, float, str]]) -> str:
    """A line for each (name, colour, value, further value in a lighter tone, text)."""
    top = max((value + more for _, _, value, more, _ in rows), default=0.0) or 1.0

    def line(name: str, colour: int, value: float, more: float, words: str) -> str:
        track = "".join(
            f'<i class="{kind} c{colour}" style="width:{share / top:.2%}"></i>'
            for kind, share in (("full", value), ("light", more))
            if share > 0
        )
        cells = element("span", 'class="name"', swatch(colour), escape(name)) + element(
            "span", 'class="track" aria-hidden="true"', track
        )
        return element("li", "", cells, text("span", words, 'class="amount"'))

    listed = element("ul", "", *(line(*row) for row in rows))
    return element("figure", 'class="bars"', text("figcaption", title), listed)
