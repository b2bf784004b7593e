"""Line charts, histograms and bars.

The drawing is an SVG that stretches with its box (lines keep their width), the labels are HTML around it: text has the
size of the page's text on a laptop and on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from tokensteer.app.report.markup import data, element, text
from tokensteer.app.words.numbers import fixed
from tokensteer.tasks.common.metrics import Measured

BANDS = 6
"""With more lines than this their bands would hide them."""
WIDTH, HEIGHT = 1000, 400  # of the drawing, in its own units


@dataclass(frozen=True)
class Line:
    """A series over the steps: its mean and the half-width of its band, NaN where nothing is known."""

    name: str
    colour: int
    mean: Sequence[float]
    band: Sequence[float]


@dataclass(frozen=True)
class Points:
    """A series over a few values, with standard errors; NaN where nothing is known."""

    name: str
    colour: int
    mean: Sequence[float]
    error: Sequence[float]


@dataclass(frozen=True)
class Spot:
    """A place in the plane, with standard errors both ways."""

    name: str
    colour: int
    x: Measured
    y: Measured


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    raw = (high - low) / about
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(k * size for k in (1, 2, 2.5, 5, 10) if k * size >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [k * step for k in range(first, last + 1)]


def frame(
    title: str, summary: str, drawing: str, x: Sequence[tuple[float, str]], y: Sequence[tuple[float, str]], extra: str
) -> str:
    """A chart with its labels, each at a place from 0 to 1, y upwards. `summary` is for those who cannot see it."""
    y_labels = "".join(text("span", label, f'style="bottom:{at:.2%}"') for at, label in y)
    x_labels = "".join(text("span", label, f'class="{edge(at)}" style="left:{at:.2%}"') for at, label in x)
    plot = element("div", 'class="plot"', drawing)
    body = element("div", 'class="y" aria-hidden="true"', y_labels) + plot
    body += element("div", 'class="x" aria-hidden="true"', x_labels)
    picture = element("div", f'class="chart" role="img" aria-label="{escape(summary)}"', body)
    return element("figure", "", text("figcaption", title), picture, extra)


def edge(at: float) -> str:
    """Labels at the ends stay inside the chart."""
    return "first" if at < 0.03 else "last" if at > 0.97 else "mid"


def drawing(content: str, width: int = WIDTH, height: int = HEIGHT, attributes: str = "") -> str:
    return element(
        "svg", f'viewBox="0 0 {width} {height}" preserveAspectRatio="none" aria-hidden="true" {attributes}', content
    )


def line_chart(title: str, lines: Sequence[Line], span: tuple[float, float] | None = None, first: bool = False) -> str:
    """One line for each series from the first step to the last. `span` fixes the y-axis, otherwise the data do.

    The key says what each line has at the end, or with `first` at the start.
    """
    lines = [line for line in lines if any(math.isfinite(v) for v in line.mean)]
    if not lines:
        return ""
    steps = max(len(line.mean) for line in lines) - 1
    low, high = _span(lines) if span is None else span
    marks = [v for v in ticks(low, high) if low - 1e-9 <= v <= high + 1e-9]

    def up(value: float) -> float:
        return HEIGHT * (1.0 - (min(max(value, low), high) - low) / (high - low))

    rules = "".join(f'<path class="rule" d="M0 {up(v):.0f}H{WIDTH}"/>' for v in marks)
    bands = "".join(_band(line, up) for line in lines) if len(lines) <= BANDS else ""
    drawn = bands + "".join(_stroke(line, up) for line in lines)
    series = [[None if not math.isfinite(v) else round(v, 4) for v in line.mean] for line in lines]
    cursor = '<path class="cursor" d="" hidden=""/>'
    svg = drawing(rules + drawn + cursor, attributes=f'class="trace" data-series="{data(series)}"')
    ends = [[v for v in line.mean if math.isfinite(v)][0 if first else -1] for line in lines]
    when = "at the first step" if first else "at the last step"
    summary = f"{title}, {when}: " + ", ".join(f"{line.name} {brief(v)}" for line, v in zip(lines, ends, strict=True))
    entries = [
        (line.name, line.colour, text("b", brief(v), 'class="value"')) for line, v in zip(lines, ends, strict=True)
    ]
    x = [(k / steps if steps else 0.0, str(k)) for k in step_marks(steps)]
    y = [((v - low) / (high - low), label) for v, label in zip(marks, alike(marks), strict=True)]
    return frame(title, summary, svg, x, y, key(entries, text("li", when, 'class="at"')))


def key(entries: Sequence[tuple[str, int, str]], after: str = "") -> str:
    """Names with their colours, each with markup after it, and something after them all."""
    items = [element("li", "", swatch(colour), escape(name) + " ", more) for name, colour, more in entries]
    return element("ul", 'class="key"', *items, after)


def point_chart(title: str, lines: Sequence[Points], labels: Sequence[str]) -> str:
    """One line for each series over a few values, at equal distances, with bars of two standard errors."""
    known = [(m, 2.0 * e if math.isfinite(e) else 0.0) for p in lines for m, e in zip(p.mean, p.error, strict=True)]
    ends = [m + s * e for m, e in known if math.isfinite(m) for s in (-1, 1)]
    if not ends:
        return ""
    low, high = _widened(min(ends), max(ends))
    places = [(k + 0.5) / len(labels) for k in range(len(labels))]

    def up(value: float) -> float:
        return HEIGHT * (1.0 - (value - low) / (high - low))

    drawn = ""
    for line in lines:
        seen = [(WIDTH * at, m, e) for at, m, e in zip(places, line.mean, line.error, strict=True) if math.isfinite(m)]
        path = "M" + "L".join(f"{x:.0f} {up(m):.1f}" for x, m, _ in seen)
        dots = "".join(f"M{x:.0f} {up(m):.1f}h0" for x, m, _ in seen)
        spans = "".join(f"M{x:.0f} {up(m - 2 * e):.1f}V{up(m + 2 * e):.1f}" for x, m, e in seen if math.isfinite(e))
        for kind, d in (("line", path), ("span", spans), ("dot", dots)):
            drawn += f'<path class="{kind} c{line.colour}" d="{d}"/>'
    marks = [v for v in ticks(low, high) if low <= v <= high]
    rules = "".join(f'<path class="rule" d="M0 {up(v):.0f}H{WIDTH}"/>' for v in marks)
    summary = f"{title}. " + "; ".join(
        f"{line.name}: "
        + ", ".join(f"{brief(m)} at {at}" for m, at in zip(line.mean, labels, strict=True) if math.isfinite(m))
        for line in lines
    )
    x = list(zip(places, labels, strict=True))
    y = [((v - low) / (high - low), label) for v, label in zip(marks, alike(marks), strict=True)]
    return frame(title, summary, drawing(rules + drawn), x, y, key([(p.name, p.colour, "") for p in lines]))


def scatter(title: str, spots: Sequence[Spot], way: Sequence[tuple[float, float]], note: str) -> str:
    """Spots with bars of two standard errors, and a line along the `way`, a few of them."""
    (left, right), (low, high) = (_room([spot.x for spot in spots]), _room([spot.y for spot in spots]))

    def across(value: float) -> float:
        return WIDTH * (value - left) / (right - left)

    def up(value: float) -> float:
        return HEIGHT * (1.0 - (value - low) / (high - low))

    drawn = '<path class="line c0" d="M' + "L".join(f"{across(x):.0f} {up(y):.1f}" for x, y in way) + '"/>'
    for spot in spots:
        x, y = spot.x.mean, spot.y.mean
        wide, tall = (2.0 * e if math.isfinite(e) else 0.0 for e in (spot.x.error, spot.y.error))
        cross = f"M{across(x - wide):.0f} {up(y):.1f}H{across(x + wide):.0f}"
        cross += f"M{across(x):.0f} {up(y - tall):.1f}V{up(y + tall):.1f}"
        label = element("title", "", escape(f"{spot.name}: {brief(x)}, {brief(y)}"))
        drawn += f'<path class="span c{spot.colour}" d="{cross}"/>'
        drawn += f'<path class="dot c{spot.colour}" d="M{across(x):.0f} {up(y):.1f}h0">{label}</path>'
    x_marks, y_marks = ([v for v in ticks(*ends) if ends[0] <= v <= ends[1]] for ends in ((left, right), (low, high)))
    rules = "".join(f'<path class="rule" d="M0 {up(v):.0f}H{WIDTH}"/>' for v in y_marks)
    summary = f"{title}. " + "; ".join(f"{s.name}: {brief(s.x.mean)}, {brief(s.y.mean)}" for s in spots)
    x_labels = [((v - left) / (right - left), label) for v, label in zip(x_marks, alike(x_marks), strict=True)]
    y_labels = [((v - low) / (high - low), label) for v, label in zip(y_marks, alike(y_marks), strict=True)]
    entries = [(spot.name, spot.colour, "") for spot in spots]
    return frame(
        title, summary, drawing(rules + drawn), x_labels, y_labels, key(entries, text("li", note, 'class="note"'))
    )


def _room(values: Sequence[Measured]) -> tuple[float, float]:
    """From the least to the most, errors and some room included."""
    ends = [v.mean + s * (2.0 * v.error if math.isfinite(v.error) else 0.0) for v in values for s in (-1, 1)]
    return _widened(min(ends), max(ends))


def _widened(low: float, high: float) -> tuple[float, float]:
    """A span with some room at both ends, more than none even where all values are the same."""
    room = 0.04 * (high - low) or max(0.5, 1e-6 * abs(low))
    return low - room, high + room


def alike(marks: Sequence[float]) -> list[str]:
    """Numbers with the same places for all."""
    places = next((p for p in range(7) if all(abs(round(v, p) - v) < 1e-9 for v in marks)), 3)
    return [fixed(v, places) for v in marks]


def brief(value: float) -> str:
    """Two places, fewer for large numbers and one more for small ones."""
    size = abs(value)
    return fixed(value, 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 or not value else 3)


def swatch(colour: int) -> str:
    return f'<i class="swatch c{colour}" aria-hidden="true"></i>'


def step_marks(steps: int) -> list[int]:
    marks = [int(v) for v in ticks(0, steps, 4) if v <= steps and v == int(v)] if steps else [0]
    return [*(k for k in marks if k <= 0.93 * steps), steps] if steps else marks


def _span(lines: Sequence[Line]) -> tuple[float, float]:
    seen = [m + s * (b if math.isfinite(b) else 0.0) for line in lines for m, b in _known(line) for s in (-1, 1)]
    return _widened(min(seen), max(seen))


def _known(line: Line) -> list[tuple[float, float]]:
    return [(m, b) for m, b in zip(line.mean, line.band, strict=True) if math.isfinite(m)]


def _places(line: Line) -> list[tuple[float, float, float]]:
    """x, mean, band wherever the mean is known."""
    steps = max(len(line.mean) - 1, 1)
    return [
        (WIDTH * k / steps, m, b) for k, (m, b) in enumerate(zip(line.mean, line.band, strict=True)) if math.isfinite(m)
    ]


def _band(line: Line, up: Callable[[float], float]) -> str:
    known = [(x, m, b) for x, m, b in _places(line) if math.isfinite(b)]
    if len(known) < 2:
        return ""
    edge = [f"{x:.0f} {up(m + b):.0f}" for x, m, b in known] + [f"{x:.0f} {up(m - b):.0f}" for x, m, b in known[::-1]]
    return f'<path class="band c{line.colour}" d="M{"L".join(edge)}z"/>'


def _stroke(line: Line, up: Callable[[float], float]) -> str:
    known = [f"{x:.0f} {up(m):.1f}" for x, m, _ in _places(line)]
    if len(known) == 1:  # a single value is a dot
        return f'<path class="dot c{line.colour}" d="M{known[0]}h0"/>'
    return f'<path class="line c{line.colour}" d="M{"L".join(known)}"/>'


def histogram(
    title: str,
    colour: int,
    shares: Sequence[float],
    labels: Sequence[str],
    top: float,
    what: str,
    marked: Sequence[str],
) -> str:
    """Bars of shares from 0 to `top`; those with `marked` labels have them below."""
    wide = WIDTH / len(shares)
    bars = "".join(
        f'<rect class="bar c{colour}" x="{k * wide + 0.08 * wide:.0f}" y="{HEIGHT * (1 - share / top):.0f}" '
        f'width="{0.84 * wide:.0f}" height="{HEIGHT * share / top:.0f}"><title>{escape(label)}: '
        f"{share:.0%}</title></rect>"
        for k, (share, label) in enumerate(zip(shares, labels, strict=True))
        if share > 0
    )
    marks = [v for v in ticks(0, top, 2) if v <= top]
    rules = "".join(f'<path class="rule" d="M0 {HEIGHT * (1 - v / top):.0f}H{WIDTH}"/>' for v in marks)
    likely = max(range(len(shares)), key=shares.__getitem__)
    summary = f"{title}: {what}. Most often {labels[likely]}, {shares[likely]:.0%}"
    x = [((k + 0.5) / len(shares), label) for k, label in enumerate(labels) if label in marked]
    y = [(v / top, f"{v:.0%}") for v in marks]
    return frame(title, summary, drawing(rules + bars), x, y, "")


def bars(title: str, rows: Sequence[tuple[str, int, float, float, str]]) -> str:
    """A line for each (name, colour, value, further value in a lighter tone, words)."""
    top = max((value + more for _, _, value, more, _ in rows), default=0.0) or 1.0

    def line(name: str, colour: int, value: float, more: float, words: str) -> str:
        track = "".join(
            f'<i class="{kind} c{colour}" style="width:{share / top:.2%}"></i>'
            for kind, share in (("full", value), ("light", more))
            if share > 0
        )
        cells = text("span", name, 'class="name"') + element("span", 'class="track" aria-hidden="true"', track)
        return element("li", "", cells, text("span", words, 'class="amount"'))

    return element(
        "figure", 'class="bars"', text("figcaption", title), element("ul", "", *(line(*row) for row in rows))
    )
