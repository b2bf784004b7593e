"""Figures for a paper, drawn with matplotlib: PNG files in the folder `figures` of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokensteer import files
from tokensteer.app.report import learning, sweeps, traces, trades
from tokensteer.app.report.charts import BANDS
from tokensteer.app.report.folder import Row, read
from tokensteer.app.report.words import COLOURS, colours_of, heading, metrics_of, naming
from tokensteer.app.runs import folder as runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TONES = ("#6b7078", "#1f55e0", "#d95f02", "#00503a", "#7a1573", "#b08a5c", "#0a9bc9")
MARKERS = "os^D"
CROWD = 8
"""More dots than that are drawn twice: all of them, and the middle half of them closer."""
WIDTH = 5.5
"""Inches: the text width of most one-column papers."""
DPI = 200
LEGEND_LINE = 0.17
"""Inches."""

Draw = Callable[["Figure"], None]


def figures(folder: Path) -> list[Path]:
    """Draw ESS and reward at every step, metrics against what was varied, and the weights at the end."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'tokensteer[plot]'") from error
    run = read(folder)
    made: list[Path] = []
    for task in run.tasks():
        rows, joined = ([row for row in some if row.task == task] for some in (run.rows, run.joined))
        for name, size, draw in _all(rows, joined, run.finished):
            figure = Figure(figsize=size, layout="constrained")
            draw(figure)
            _legend(figure)
            made.append(folder / runs.FIGURES / f"{task}-{name}.png")
            files.write_whole(made[-1], lambda file, drawn=figure: drawn.savefig(file, dpi=DPI, format="png"))  # pyright: ignore
    return made


def _all(rows: Sequence[Row], joined: Sequence[Row], finished: bool) -> list[tuple[str, tuple[float, float], Draw]]:
    """Name, size in inches and content of each figure."""
    panels = traces.by_size(rows)
    colours = colours_of(rows)
    found: list[tuple[str, tuple[float, float], Draw]] = [
        ("traces", (WIDTH, 0.4 + 2.2 * len(panels)), lambda figure: _traces(figure, panels, colours)),
        ("weights", (WIDTH, 0.4 + 2.2 * len(panels)), lambda figure: _weights(figure, panels, colours)),
    ]
    axis = sweeps.axis(joined)
    if axis is not None:
        height = 0.4 + 2.0 * math.ceil(len(metrics_of(rows)) / 2)
        found.append(("metrics", (WIDTH, height), lambda figure: _metrics(figure, joined, axis, colours)))
    trade = trades.trade(joined) if finished else None
    if trade is not None:
        found.append(("front", (WIDTH, 3.6), lambda figure: _front(figure, trade, colours)))
    costs = learning.costs_of(rows)
    if any(cost.once for cost in costs):
        found.append(("break-even", (WIDTH, 3.0), lambda figure: _break_even(figure, costs)))
    return found


def _break_even(figure: Figure, costs: Sequence[learning.Cost]) -> None:
    """Rows spent against populations drawn, training included."""
    axes: Axes = figure.subplots()
    meetings = [learning.break_even(a, b) for a in costs for b in costs if a.once > b.once]
    last = 2 * max((draws for draws in meetings if draws is not None), default=100.0)
    for k, cost in enumerate(costs):
        rows = [cost.once, cost.once + last * cost.each]
        axes.plot([0, last], rows, label=cost.name, linewidth=1.2, **_style(1 + k % COLOURS))  # pyright: ignore
    _plain(axes, "denoiser and proposal rows, training included", "populations")


def _front(figure: Figure, trade: trades.Trade, colours: Mapping[str, int]) -> None:
    """One metric against another, a line along those who are beaten in neither; of a crowd its middle too."""
    whole, *closer = figure.subplots(1, 2 if len(trade.rows) > CROWD else 1, squeeze=False)[0]  # pyright: ignore
    for axes in (whole, *closer):
        _spots(axes, trade, colours)
    for axes in closer:
        for metric, limit in ((trade.x, axes.set_xlim), (trade.y, axes.set_ylim)):
            means = sorted(row.metrics[metric].mean for row in trade.rows)
            outer = len(means) // 4
            room = (means[-1 - outer] - means[outer]) or 1.0
            limit(means[outer] - 0.5 * room, means[-1 - outer] + 0.5 * room)
        _plain(axes, f"{heading(trade.y)}, closer", heading(trade.x))


def _spots(axes: Axes, trade: trades.Trade, colours: Mapping[str, int]) -> None:
    way = [(row.metrics[trade.x].mean, row.metrics[trade.y].mean) for row in trade.front]
    axes.plot(*zip(*way, strict=True), color=TONES[0], linewidth=0.8, zorder=0)  # pyright: ignore
    name = naming(trade.rows)
    for k, row in enumerate(trade.rows):
        x, y = row.metrics[trade.x], row.metrics[trade.y]
        wide, tall = (2 * m.error if math.isfinite(m.error) else 0.0 for m in (x, y))
        axes.errorbar(  # pyright: ignore[reportUnknownMemberType]
            [x.mean],
            [y.mean],
            [tall],
            [wide],
            label=name(row),
            linewidth=0.6,
            marker=MARKERS[k // 6 % len(MARKERS)],  # there are six colours
            markersize=3.5,
            **_style(colours[row.method]),  # pyright: ignore[reportArgumentType]
        )
    _plain(axes, heading(trade.y), heading(trade.x))


def _style(index: int) -> dict[str, str]:
    """The colours of the page; where they begin again, dashes."""
    return {
        "color": TONES[(index - 1) % 6 + 1] if index else TONES[0],
        "linestyle": "--" if index > 6 else "-",
    }


def _traces(figure: Figure, panels: Sequence[tuple[str, Sequence[Row]]], colours: Mapping[str, int]) -> None:
    grid: list[list[Axes]] = figure.subplots(len(panels), 2, squeeze=False).tolist()  # pyright: ignore
    for (words, rows), (left, right) in zip(panels, grid, strict=True):
        _lines(left, f"ESS/N{words}", rows, colours, traces.ess_share)
        left.set_ylim(0, 1.03)
        _lines(right, f"mean reward{words}", rows, colours, traces.mean_reward)


def _lines(axes: Axes, title: str, rows: Sequence[Row], colours: Mapping[str, int], look: traces.Look) -> None:
    found = traces.lines(rows, colours, look)
    for line in found:
        steps = [k for k, v in enumerate(line.mean) if math.isfinite(v)]
        mean = [line.mean[k] for k in steps]
        style = _style(line.colour)
        marker = "o" if len(steps) == 1 else ""
        axes.plot(steps, mean, label=line.name, linewidth=1.2, marker=marker, **style)  # pyright: ignore
        if len(found) > BANDS:
            continue
        low, high = ([line.mean[k] + s * line.band[k] for k in steps] for s in (-1, 1))
        axes.fill_between(steps, low, high, color=style["color"], alpha=0.12, linewidth=0)  # pyright: ignore
    _plain(axes, title, "step")


def _weights(figure: Figure, panels: Sequence[tuple[str, Sequence[Row]]], colours: Mapping[str, int]) -> None:
    """Steps instead of bars, so that methods can share a panel."""
    axes_of: list[list[Axes]] = figure.subplots(len(panels), 1, squeeze=False).tolist()  # pyright: ignore
    for (words, rows), (axes,) in zip(panels, axes_of, strict=True):
        most = traces.heaviest(rows)
        labels = traces.weight_labels(most)
        methods = list(dict.fromkeys(row.method for row in rows))
        for method, name in zip(methods, traces.shorter(methods), strict=True):
            shares = traces.weight_shares([row.result for row in rows if row.method == method], most)
            style = _style(colours[method])
            axes.step(range(len(labels)), shares, where="mid", label=name, linewidth=1.2, **style)  # pyright: ignore
        axes.set_xticks(range(len(labels)), labels, fontsize=6)  # pyright: ignore[reportUnknownMemberType]
        _plain(axes, f"share of particles{words}", "N · weight")


def _metrics(figure: Figure, rows: Sequence[Row], axis: sweeps.Axis, colours: Mapping[str, int]) -> None:
    names = metrics_of(rows)
    at = {value: float(k) for k, value in enumerate(axis.values)}  # equal distances, as on the page
    grid: list[list[Axes]] = figure.subplots(math.ceil(len(names) / 2), 2, squeeze=False).tolist()  # pyright: ignore
    places = [axes for line in grid for axes in line]
    for axes, metric in zip(places, names, strict=False):
        for k, (name, some) in enumerate(axis.series.items()):
            # Side by side, so that no bar hides another.
            aside = 0.08 * (k - (len(axis.series) - 1) / 2)
            known = [(at[x] + aside, row.metrics[metric]) for x, row in some.items() if metric in row.metrics]
            axes.errorbar(  # pyright: ignore[reportUnknownMemberType]
                [x for x, _ in known],
                [m.mean for _, m in known],
                [2 * m.error if math.isfinite(m.error) else 0.0 for _, m in known],
                label=name,
                linewidth=1.2,
                marker="o",
                markersize=3,
                **_style(colours.get(name, 1 + k % COLOURS)),  # pyright: ignore[reportArgumentType]
            )
        axes.set_xticks(list(at.values()), [f"{v:g}" for v in axis.values])  # pyright: ignore[reportUnknownMemberType]
        _plain(axes, heading(metric), axis.name)
    for axes in places[len(names) :]:
        axes.set_axis_off()


def _legend(figure: Figure) -> None:
    """One for all panels, below them, where it hides no line."""
    named: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    columns = max(1, min(5, 80 // (6 + max(map(len, named), default=0))))
    height = figure.get_figheight() + LEGEND_LINE * math.ceil(len(named) / columns)
    figure.set_figheight(height)
    figure.legend(  # pyright: ignore[reportUnknownMemberType]
        list(named.values()),
        list(named),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=7,
    )


def _plain(axes: Axes, title: str, below: str) -> None:
    axes.set_title(title, fontsize=9, loc="left")  # pyright: ignore[reportUnknownMemberType]
    axes.set_xlabel(below, fontsize=8)  # pyright: ignore[reportUnknownMemberType]
    axes.tick_params(labelsize=7)  # pyright: ignore[reportUnknownMemberType]
    axes.spines[["top", "right"]].set_visible(False)
