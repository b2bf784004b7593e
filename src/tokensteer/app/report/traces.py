"""ESS, reward, ramp and survivors at every step, the weights at the end, and the cost of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tokensteer.app.report.charts import Line, bars, histogram, line_chart
from tokensteer.app.report.folder import Row
from tokensteer.app.report.genealogy import ancestors_alive
from tokensteer.app.report.intervals import LEVEL, student
from tokensteer.app.report.lists import floats
from tokensteer.app.report.markup import element
from tokensteer.app.report.words import several_sizes
from tokensteer.app.words.numbers import NOTHING, duration, short
from tokensteer.core.particles.result import Result

MOST = 12  # how many lines of variants a chart takes
SURVIVORS = "Share of particles with descendants at the end"
LEAST = -6  # the log2 of N·w below which particles share a bar

Trace = Callable[[Result], Tensor | None]
"""A quantity of a result at every step, (T + 1, B), None if it has none."""


def ess_share(result: Result) -> Tensor:
    return result.ess / result.log_w.shape[1]


def survivors(result: Result) -> Tensor | None:
    """The share of the particles of each step that have descendants at the end."""
    size = result.log_w.shape[1]
    return ancestors_alive(result).double() / size if size > 1 else None


def over_populations(values: Tensor) -> tuple[list[float], list[float]]:
    """The mean of values (T + 1, B) over B and half its 95% interval, NaN where a value is not finite."""
    values = values.double()
    known = values.isfinite().all(-1)
    mean = torch.where(known, values.mean(-1), math.nan)
    count = values.shape[-1]
    error = values.std(-1) / math.sqrt(count) if count > 1 else torch.full_like(mean, math.nan)
    wide = student(LEVEL, count - 1) if count > 1 else math.nan
    return floats(mean), floats(torch.where(known, wide * error, math.nan))


def lines(rows: Sequence[Row], colours: Mapping[str, int], trace: Trace) -> list[Line]:
    """A line for each method, over the populations of all its seeds."""
    found: list[Line] = []
    for method in dict.fromkeys(row.method for row in rows):
        seen = [trace(row.result) for row in rows if row.method == method]
        known = [values for values in seen if values is not None]
        if known and len({len(values) for values in known}) == 1:
            found.append(Line(method, colours[method], *over_populations(torch.cat(known, -1))))
    names = shorter([line.name for line in found])
    return [replace(line, name=name) for line, name in zip(found, names, strict=True)]


def shorter(names: Sequence[str]) -> list[str]:
    """The names without the words that all of them begin with."""
    parts = [name.split(", ") for name in names]
    same = 0
    while len(names) > 1 and all(len(p) > same + 1 and p[same] == parts[0][same] for p in parts):
        same += 1
    return [", ".join(p[same:]) for p in parts]


def by_size(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Groups of rows that share a chart, each with a text to add to the chart's title. Rows are grouped by size where a
    method has several, and by method too if variants would make more than MOST lines."""
    found: list[tuple[str, list[Row]]] = []
    for size in dict.fromkeys(row.particles for row in rows) if several_sizes(rows) else [None]:
        some = [row for row in rows if size in (None, row.particles)]
        words = "" if size is None else f", N = {size}"
        groups: dict[str, list[Row]] = {}
        crowded = len({row.method for row in some}) > MOST and any(row.variant for row in some)
        for row in some:
            groups.setdefault(", ".join((row.family, *row.variant[:-1])) if crowded else "", []).append(row)
        found += [(words + (f", {key}" if key else ""), group) for key, group in groups.items()]
    return found


def charts(rows: Sequence[Row], colours: Mapping[str, int]) -> str:
    """ESS, reward, ramp and survivors, a chart of each for every size."""
    traces: list[tuple[str, Trace, tuple[float, float] | None]] = [
        ("ESS/N", ess_share, (0.0, 1.0)),
        ("Mean reward, unweighted", lambda result: result.mean_reward, None),
        ("Adaptive ramp λ", lambda result: result.ramp, (0.0, 1.0)),
        (SURVIVORS, survivors, (0.0, 1.0)),
    ]
    groups: list[str] = []
    for size, some in by_size(rows):
        drawn: list[str] = []
        for title, trace, span in traces:
            found = [line for line in lines(some, colours, trace) if sum(map(math.isfinite, line.mean)) > 1]
            if found:  # a single point is in the table
                drawn.append(line_chart(title + size, found, span, first=trace is survivors))
        groups.append(element("div", 'class="row"', *drawn))
    return "".join(groups)


def weight_shares(rows: Sequence[Row]) -> tuple[list[str], dict[str, list[float]]]:
    """A histogram of N times the final weights, on a log2 scale: the label of each bar, and by method the share of
    particles in each: of no weight, then with N·w near 2^-6, 2^-5, ..., up to the heaviest."""
    most = min(10, max(1, *(round(float((row.result.weights.max() * row.particles).log2())) for row in rows)))
    labels = ["0", f"≤1/{2**-LEAST}", *(f"1/{2**-k}" if k < 0 else f"{2**k}" for k in range(LEAST + 1, most + 1))]
    shares: dict[str, list[float]] = {}
    for method in dict.fromkeys(row.method for row in rows):
        weights = [row.result.weights * row.particles for row in rows if row.method == method]
        relative = torch.cat([weight.flatten() for weight in weights]).double()
        places = torch.where(relative > 0, relative.log2().round().clamp(LEAST, most), LEAST - 1)
        shares[method] = [float((places == k).double().mean()) for k in range(LEAST - 1, most + 1)]
    return labels, shares


def weights(rows: Sequence[Row], colours: Mapping[str, int]) -> str:
    """A histogram for each method and size."""
    drawn: list[str] = []
    groups = [(size, *weight_shares(some)) for size, some in by_size(rows)]
    top = max(share for _, _, shares in groups for some in shares.values() for share in some)
    for size, labels, shares in groups:
        marked = ("0", "1/16", "1", labels[-1])
        drawn += [histogram(f"{m}{size}", colours[m], shares[m], labels, top, marked) for m in shares]
    return element("div", 'class="trio"', *drawn)


def cost(rows: Sequence[Row], name: Callable[[Row], str], colours: Mapping[str, int]) -> str:
    """Bars for each network and for the time."""

    def entry(row: Row, network: str) -> tuple[str, int, float, float, str]:
        spent, saved = row.rows.get(network, 0), row.saved.get(network, 0)
        words = (short(spent) + (f" + {short(saved)}" if saved else "")) if network in row.rows else NOTHING
        return name(row), colours[row.method], float(spent), float(saved), words

    networks = dict.fromkeys(network for row in rows for network in row.rows)
    drawn = [bars(f"{network.capitalize()} rows", [entry(row, network) for row in rows]) for network in networks]
    times = [
        (name(row), colours[row.method], 0.0 if math.isnan(row.seconds) else row.seconds, 0.0, duration(row.seconds))
        for row in rows
    ]
    return element("div", 'class="trio wide"', *drawn, bars("Time", times))
