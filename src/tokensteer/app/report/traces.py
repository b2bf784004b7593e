"""What happened on the way: ESS, reward and ramp at every step, the weights at the end, what it cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tokensteer.app.report.charts import Line, bars, histogram, line_chart
from tokensteer.app.report.folder import Row
from tokensteer.app.report.genealogy import ancestors_alive
from tokensteer.app.report.lists import floats
from tokensteer.app.report.markup import element
from tokensteer.app.words.numbers import duration, short
from tokensteer.core.particles.result import Result

Look = Callable[[Result], Tensor | None]
"""Something of a result at every step, (T + 1, B), if it has it."""


def ess_share(result: Result) -> Tensor:
    return result.ess / result.log_w.shape[1]


def mean_reward(result: Result) -> Tensor | None:
    return result.mean_reward


def ramp(result: Result) -> Tensor | None:
    return result.ramp


def alive_share(result: Result) -> Tensor:
    """The share of particles of each step that have descendants at the end."""
    return ancestors_alive(result).double() / result.log_w.shape[1]


def over_populations(values: Tensor) -> tuple[list[float], list[float]]:
    """The mean of (T + 1, B) and twice its standard error, NaN where a value is not finite."""
    values = values.double()
    known = values.isfinite().all(-1)
    mean = torch.where(known, values.mean(-1), math.nan)
    count = values.shape[-1]
    error = values.std(-1) / math.sqrt(count) if count > 1 else torch.full_like(mean, math.nan)
    return floats(mean), floats(torch.where(known, 2.0 * error, math.nan))


def lines(rows: Sequence[Row], colours: Mapping[str, int], look: Look) -> list[Line]:
    """One for each method; the populations of several seeds count together."""
    found: list[Line] = []
    for method in dict.fromkeys(row.method for row in rows):
        seen = [look(row.result) for row in rows if row.method == method]
        known = [values for values in seen if values is not None]
        if known and len({len(values) for values in known}) == 1:
            found.append(Line(method, colours[method], *over_populations(torch.cat(known, -1))))
    names = shorter([line.name for line in found])
    return [replace(line, name=name) for line, name in zip(found, names, strict=True)]


def shorter(names: Sequence[str]) -> list[str]:
    """Without the words that all begin with, if only variants of one method are left."""
    parts = [name.split(", ") for name in names]
    same = 0
    while len(names) > 1 and all(len(p) > same + 1 and p[same] == parts[0][same] for p in parts):
        same += 1
    return [", ".join(p[same:]) for p in parts]


MOST = 12
"""How many lines a chart takes."""


def by_size(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows that share a chart, with words for what they share: a size, and if they are too many a method."""
    sizes = list(dict.fromkeys(row.particles for row in rows))
    found: list[tuple[str, list[Row]]] = []
    for size in sizes:
        some = [row for row in rows if row.particles == size]
        words = f", N = {size}" if len(sizes) > 1 else ""
        groups: dict[str, list[Row]] = {}
        crowded = len({row.method for row in some}) > MOST
        for row in some:
            groups.setdefault(", ".join((row.family, *row.variant[:-1])) if crowded else "", []).append(row)
        found += [(words + (f", {key}" if key else ""), group) for key, group in groups.items()]
    return found


def charts(rows: Sequence[Row], colours: Mapping[str, int]) -> str:
    """ESS, reward and ramp, a chart of each for every size."""
    drawn: list[str] = []
    for size, some in by_size(rows):
        drawn.append(line_chart(f"ESS/N{size}", lines(some, colours, ess_share), (0.0, 1.0)))
        drawn.append(line_chart(f"Mean reward of the particles{size}", lines(some, colours, mean_reward)))
        drawn.append(line_chart(f"Adaptive ramp λ{size}", lines(some, colours, ramp), (0.0, 1.0)))
    return element("div", 'class="pair"', *drawn)


def survival(rows: Sequence[Row], colours: Mapping[str, int]) -> str:
    """How fast family lines merge, for every size."""
    drawn = [
        line_chart(
            f"Particles that have descendants at the end, as a share of N{size}",
            lines([row for row in some if row.particles > 1], colours, alive_share),
            (0.0, 1.0),
            first=True,
        )
        for size, some in by_size(rows)
    ]
    return element("div", 'class="pair"', *drawn)


# ---- weights at the end

LEAST = -6  # of the log2 of N·w that has a bar of its own


def weight_shares(results: Iterable[Result], most: int) -> list[float]:
    """The share of particles of no weight, then of those with N·w near 2^-6, 2^-5, ..., 2^most."""
    relative = torch.cat([(result.weights * result.log_w.shape[1]).flatten() for result in results]).double()
    places = relative.log2().round().clamp(LEAST, most)
    shares = [float((relative == 0).double().mean())]
    shares += [float(((places == k) & (relative > 0)).double().mean()) for k in range(LEAST, most + 1)]
    return shares


def heaviest(rows: Sequence[Row]) -> int:
    """The last bar that is needed: the log2 of N·w of the heaviest particle."""
    return min(10, max(1, *(round(float((r.result.weights.max() * r.particles).log2())) for r in rows)))


def weight_labels(most: int) -> list[str]:
    return ["0", f"≤1/{2**-LEAST}", *(f"1/{2**-k}" if k < 0 else f"{2**k}" for k in range(LEAST + 1, most + 1))]


def weights(rows: Sequence[Row], colours: Mapping[str, int]) -> str:
    """A histogram for each method and size."""
    drawn: list[str] = []
    for size, some in by_size(rows):
        methods = list(dict.fromkeys(row.method for row in some))
        results = {m: [row.result for row in some if row.method == m] for m in methods}
        most = heaviest(some)
        shares = {m: weight_shares(results[m], most) for m in methods}
        top = max(max(s) for s in shares.values())
        labels = weight_labels(most)
        drawn += [
            histogram(
                f"{m}{size}",
                colours[m],
                shares[m],
                labels,
                top,
                "share of particles by N times their weight",
                ("0", "1/16", "1", labels[-1]),
            )
            for m in methods
        ]
    return element("div", 'class="trio"', *drawn)


# ---- cost


def cost(rows: Sequence[Row], name: Callable[[Row], str], colours: Mapping[str, int]) -> str:
    """Bars for each network and for the time."""
    networks = dict.fromkeys(network for row in rows for network in row.rows)
    drawn: list[str] = []
    for network in networks:
        entries: list[tuple[str, int, float, float, str]] = []
        for row in rows:
            spent, saved = row.rows.get(network, 0), row.saved.get(network, 0)
            words = short(spent) + (f" + {short(saved)}" if saved else "")
            entries.append((name(row), colours[row.method], float(spent), float(saved), words))
        drawn.append(bars(f"{network.capitalize()} rows", entries))
    times = [
        (name(row), colours[row.method], 0.0 if math.isnan(row.seconds) else row.seconds, 0.0, duration(row.seconds))
        for row in rows
    ]
    return element("div", 'class="trio wide"', *drawn, bars("Time", times))
