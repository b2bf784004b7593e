"""Figures of several runs, of a training and of costs, in the style of `tokensteer report --figures`.

    python -m benchmarks.figures sizes out/a out/b --metrics alignment judge --out out/sizes.png
    python -m benchmarks.figures training out/proposal/emoji-proposal.json --out out/training.png
    python -m benchmarks.figures seconds out/emoji/cost.jsonl --out out/seconds.png

They need matplotlib: pip install 'tokensteer[plot]'. One run folder has its figures from `tokensteer report FOLDER
--figures`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

from benchmarks.run_folders import by_size, over_seeds, read_all
from benchmarks.seconds import ALONE, Panel, panels
from tokensteer import files
from tokensteer.app.report import sweeps
from tokensteer.app.report.figures import DPI, WIDTH, against_size, grid, legend, line_style, plain
from tokensteer.app.report.folder import Row
from tokensteer.app.report.learning import CURVES
from tokensteer.app.report.words import COLOURS, colours_of
from tokensteer.app.words.numbers import loaded, short
from tokensteer.tasks.common.task import read_card
from tokensteer.tasks.common.training import say


def sizes(
    folders: tyro.conf.Positional[tuple[Path, ...]],
    metrics: tuple[str, ...] = ("alignment", "judge"),
    out: Path = Path("out/sizes.png"),
) -> None:
    """Metrics against N, a line for each method, from run folders of `tokensteer compare` of one target: means over
    seeds, bars of two standard errors."""
    rows = [over_seeds(group) for group in by_size(read_all(folders)).values()]
    for metric in metrics:
        if not any(metric in row.metrics for row in rows):
            known = ", ".join(dict.fromkeys(name for row in rows for name in row.metrics))
            raise ValueError(f"no row has the metric {metric}: give --metrics of {known}")
    shown = [replace(row, metrics={name: row.metrics[name] for name in metrics if name in row.metrics}) for row in rows]
    if (axis := sweeps.axis(_level(shown))) is None:
        raise ValueError("all rows have the same N: run `tokensteer compare` with --particles 2 4 8")
    height = 0.4 + 2.0 * math.ceil(len(metrics) / 2)
    _write(out, height, lambda figure: against_size(figure, shown, axis, colours_of(shown)))


def _level(rows: Sequence[Row]) -> list[Row]:
    """The rows, and for each N that the model alone lacks its row of most particles: its draws do not depend on N."""
    alone = {row.particles: row for row in rows if row.family == ALONE}
    lacking = {row.particles for row in rows} - alone.keys()
    return [*rows, *(replace(alone[max(alone)], particles=size) for size in sorted(lacking) if alone)]


def training(
    card: tyro.conf.Positional[Path],
    curves: tuple[str, ...] = ("loss", "reward"),
    out: Path = Path("out/training.png"),
) -> None:
    """The course of a learned proposal, from the history in its card: `curves` of loss, ess, reward and divergence."""
    known = read_card(card)
    history: Sequence[Mapping[str, Any]] = known.get("history", ())
    if not history:
        raise ValueError(f"{card} has no history: give the card of a learned proposal, such as emoji-proposal.json")
    for name in curves:
        if name not in CURVES or not any(math.isfinite(loaded(entry.get(name))) for entry in history):
            raise ValueError(f"{card} has no {name}: give --curves of {', '.join(CURVES)}")
    steps = [entry["step"] for entry in history]
    rows = known.get("denoiser rows")
    below = "round" if rows is None else f"round, {short(rows)} rows of the denoiser in all"

    def draw(figure: Any) -> None:
        every = [axes for line in grid(figure, math.ceil(len(curves) / 2), min(2, len(curves))) for axes in line]
        for axes, name in zip(every, curves, strict=False):
            title, span = CURVES[name]
            axes.plot(steps, [loaded(entry.get(name)) for entry in history], linewidth=1.2, **line_style(1))
            if span is not None:
                axes.set_ylim(*span)
            plain(axes, title, below)
        for axes in every[len(curves) :]:
            axes.set_axis_off()

    _write(out, 0.4 + 2.0 * math.ceil(len(curves) / 2), draw)


def seconds(
    file: tyro.conf.Positional[Path] = Path("out/emoji/cost.jsonl"), out: Path = Path("out/emoji/seconds.png")
) -> None:
    """Seconds of an image against N, a line for each method, from the lines of `python -m benchmarks.emoji cost`."""
    found = panels(file)
    _write(out, 0.4 + 2.6 * len(found), lambda figure: _seconds(figure, found))


def _seconds(figure: Any, found: Sequence[Panel]) -> None:
    names = [name for name in dict.fromkeys(name for _, some in found for name in some) if name != ALONE]
    colours = {ALONE: 0, **{name: 1 + k % COLOURS for k, name in enumerate(names)}}
    for (words, some), (axes,) in zip(found, grid(figure, len(found), 1), strict=True):
        for name, by_n in some.items():
            style = {"linewidth": 1.2, **line_style(colours[name])}
            if name == ALONE:
                axes.axhline(by_n[1], label=name, **style)
            else:
                axes.plot(list(by_n), list(by_n.values()), label=name, marker="o", markersize=3, **style)
        every = sorted({n for by_n in some.values() for n in by_n})
        axes.set_xscale("log", base=2)
        axes.set_xticks(every, [f"{n}" for n in every])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        plain(axes, f"seconds of an image, {words}", "N")


def _write(file: Path, height: float, draw: Callable[[Any], None]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'tokensteer[plot]'") from error
    figure: Any = Figure(figsize=(WIDTH, height), layout="constrained")
    draw(figure)
    legend(figure)
    files.write_whole(file, lambda place: figure.savefig(place, dpi=DPI, format="png"))
    say(f"Figure: {file}")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"sizes": sizes, "training": training, "seconds": seconds})
