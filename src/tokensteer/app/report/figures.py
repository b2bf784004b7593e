"""Figures for a paper, drawn with matplotlib: PNG files in the folder `figures` of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tokensteer import files
from tokensteer.app.report import learning, sweeps, traces, trades
from tokensteer.app.report.charts import BANDS
from tokensteer.app.report.folder import Row, read
from tokensteer.app.report.words import COLOURS, colours_of, metrics_of, naming
from tokensteer.app.runs import folder as runs
from tokensteer.app.words.metrics import title
from tokensteer.tasks.common.metrics import Measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TONES = ("#6b7078", "#1f55e0", "#d95f02", "#00503a", "#7a1573", "#b08a5c", "#0a9bc9")
MARKERS = "os^D"
CROWD = 8  # with more dots than that, a second panel shows the middle half of them closer
WIDTH = 5.5  # inches: the text width of most one-column papers
DPI = 200
LEGEND_LINE = 0.17  # inches

Axes = Any  # matplotlib leaves the arguments of their methods untyped
Draw = Callable[["Figure"], None]
Panels = Sequence[tuple[str, Sequence[Row]]]


def figures(folder: Path) -> list[Path]:
    """Draw every figure that the rows of a run folder allow; returns their files."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'tokensteer[plot]'") from error
    run = read(folder)
    made: list[Path] = []
    for task, (rows, joined) in run.by_task().items():
        for name, height, draw in _all(rows, joined, run.finished):
            figure: Any = Figure(figsize=(WIDTH, height), layout="constrained")
            draw(figure)
            legend(figure)
            made.append(folder / runs.FIGURES / f"{task}-{name}.png")
            files.write_whole(made[-1], lambda file, drawn=figure: drawn.savefig(file, dpi=DPI, format="png"))
    return made


def _all(rows: Sequence[Row], joined: Sequence[Row], finished: bool) -> Iterator[tuple[str, float, Draw]]:
    """Name, height in inches and content of each figure."""
    panels, colours = traces.by_size(rows), colours_of(rows)
    yield "traces", 0.4 + 2.2 * len(panels), lambda figure: _traces(figure, panels, colours)
    yield "weights", 0.4 + 2.2 * len(panels), lambda figure: _weights(figure, panels, colours)
    if axis := sweeps.axis(joined):
        height = 0.4 + 2.0 * math.ceil(len(metrics_of(rows)) / 2)
        yield "metrics", height, lambda figure: against_size(figure, joined, axis, colours)
    if finished and (trade := trades.trade(joined)):
        yield "front", 3.6, lambda figure: _front(figure, trade, colours)
    costs = learning.costs_of(rows)
    if any(cost.once for cost in costs):
        yield "break-even", 3.0, lambda figure: _break_even(figure, costs)


def grid(figure: Figure, rows: int, columns: int) -> list[list[Axes]]:
    return cast("Any", figure).subplots(rows, columns, squeeze=False).tolist()


def _break_even(figure: Figure, costs: Sequence[learning.Cost]) -> None:
    """Rows spent against populations drawn, training included."""
    ((axes,),) = grid(figure, 1, 1)
    meetings = [learning.break_even(a, b) for a in costs for b in costs if a.once > b.once]
    last = 2 * max((draws for draws in meetings if draws is not None), default=100.0)
    for k, cost in enumerate(costs):
        rows = [cost.once, cost.once + last * cost.each]
        axes.plot([0, last], rows, label=cost.name, linewidth=1.2, **line_style(1 + k % COLOURS))
    plain(axes, "denoiser and proposal rows, training included", "populations")


def _front(figure: Figure, trade: trades.Trade, colours: Mapping[str, int]) -> None:
    """One metric against another with a line along the Pareto front; of a crowd the middle half too."""
    ((whole, *closer),) = grid(figure, 1, 2 if len(trade.rows) > CROWD else 1)
    for axes in (whole, *closer):
        _spots(axes, trade, colours)
    for axes in closer:
        for metric, limit in ((trade.x, axes.set_xlim), (trade.y, axes.set_ylim)):
            means = sorted(row.metrics[metric].mean for row in trade.rows)
            outer = len(means) // 4
            room = (means[-1 - outer] - means[outer]) or 1.0
            limit(means[outer] - 0.5 * room, means[-1 - outer] + 0.5 * room)
        plain(axes, f"{title(trade.y)}, closer", title(trade.x))


def _spots(axes: Axes, trade: trades.Trade, colours: Mapping[str, int]) -> None:
    axes.plot([x for x, _ in trade.way], [y for _, y in trade.way], color=TONES[0], linewidth=0.8, zorder=0)
    name = naming(trade.rows)
    for k, row in enumerate(trade.rows):
        x, y = row.metrics[trade.x], row.metrics[trade.y]
        marker = MARKERS[k // 6 % len(MARKERS)]  # there are six colours
        style = {"linewidth": 0.6, "marker": marker, "markersize": 3.5, **line_style(colours[row.method])}
        axes.errorbar([x.mean], [y.mean], [_bar(y)], [_bar(x)], label=name(row), **style)
    plain(axes, title(trade.y), title(trade.x))


def _bar(measured: Measured) -> float:
    """Two standard errors, 0 if unknown."""
    return 2 * measured.error if math.isfinite(measured.error) else 0.0


def line_style(index: int) -> dict[str, str]:
    """The colours of the page in four patterns."""
    return {
        "color": TONES[(index - 1) % 6 + 1] if index else TONES[0],
        "linestyle": ("-", "--", ":", "-.")[(index - 1) // 6 % 4] if index else "-",
    }


def _traces(figure: Figure, panels: Panels, colours: Mapping[str, int]) -> None:
    for (words, rows), (left, right) in zip(panels, grid(figure, len(panels), 2), strict=True):
        _lines(left, f"ESS/N{words}", rows, colours, traces.ess_share)
        left.set_ylim(0, 1.03)
        _lines(right, f"mean reward{words}", rows, colours, lambda result: result.mean_reward)


def _lines(axes: Axes, name: str, rows: Sequence[Row], colours: Mapping[str, int], trace: traces.Trace) -> None:
    found = traces.lines(rows, colours, trace)
    for line in found:
        steps = [k for k, v in enumerate(line.mean) if math.isfinite(v)]
        mean = [line.mean[k] for k in steps]
        style = line_style(line.colour)
        axes.plot(steps, mean, label=line.name, linewidth=1.2, marker="o" if len(steps) == 1 else "", **style)
        if len(found) <= BANDS:
            low, high = ([line.mean[k] + s * line.band[k] for k in steps] for s in (-1, 1))
            axes.fill_between(steps, low, high, color=style["color"], alpha=0.12, linewidth=0)
    plain(axes, name, "step")


def _weights(figure: Figure, panels: Panels, colours: Mapping[str, int]) -> None:
    """Steps instead of bars, so that methods can share a panel."""
    for (words, rows), (axes,) in zip(panels, grid(figure, len(panels), 1), strict=True):
        labels, shares = traces.weight_shares(rows)
        places = range(len(labels))
        for method, name in zip(shares, traces.shorter(list(shares)), strict=True):
            axes.step(places, shares[method], where="mid", label=name, linewidth=1.2, **line_style(colours[method]))
        axes.set_xticks(places, labels, fontsize=6)
        plain(axes, f"share of particles{words}", "N · weight")


def against_size(figure: Figure, rows: Sequence[Row], axis: sweeps.Axis, colours: Mapping[str, int]) -> None:
    names = metrics_of(rows)
    at = {value: float(k) for k, value in enumerate(axis.values)}  # equal distances, as on the page
    panels = [axes for line in grid(figure, math.ceil(len(names) / 2), 2) for axes in line]
    for axes, metric in zip(panels, names, strict=False):
        for k, (name, some) in enumerate(axis.series.items()):
            aside = 0.08 * (k - (len(axis.series) - 1) / 2)  # side by side, so that no bar hides another
            known = [(at[x] + aside, row.metrics[metric]) for x, row in some.items() if metric in row.metrics]
            values = [x for x, _ in known], [m.mean for _, m in known], [_bar(m) for _, m in known]
            style = {"linewidth": 1.2, "marker": "o", "markersize": 3, **line_style(colours.get(name, 1 + k % COLOURS))}
            axes.errorbar(*values, label=name, **style)
        axes.set_xticks(list(at.values()), [f"{v:g}" for v in axis.values])
        plain(axes, title(metric), axis.name)
    for axes in panels[len(names) :]:
        axes.set_axis_off()


def legend(figure: Any) -> None:
    """One legend for all panels, below them, where it hides no line."""
    named: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    columns = max(1, min(5, 80 // (6 + max(map(len, named), default=0))))
    figure.set_figheight(figure.get_figheight() + LEGEND_LINE * math.ceil(len(named) / columns))
    place = {"loc": "outside lower center", "ncols": columns, "frameon": False, "fontsize": 7}
    figure.legend(list(named.values()), list(named), **place)


def plain(axes: Axes, name: str, below: str) -> None:
    axes.set_title(name, fontsize=9, loc="left")
    axes.set_xlabel(below, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
