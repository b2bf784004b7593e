"""How the proposals of a run were learned, and when that has paid off."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokensteer.app.report.charts import Line, line_chart
from tokensteer.app.report.folder import Row
from tokensteer.app.report.markup import element, text
from tokensteer.app.report.words import listed
from tokensteer.app.words.numbers import duration, short

CURVES = {
    "loss": "Loss",
    "ess": "ESS/N of the proposal's paths, without resampling",
    "reward": "Reward/kl of the proposal's paths",
    "divergence": "KL from the model",
}
BACKWARD = 2
"""Rows that a backward pass is counted as."""


def charts(rows: Sequence[Row]) -> str:
    """The curves of every training that methods of a task rest on, and when it has paid off."""
    shared: list[tuple[Mapping[str, Any], list[str]]] = []
    for row in rows:
        if row.training is None:
            continue
        names = next((names for training, names in shared if training == row.training), None)
        if names is None:
            shared.append((row.training, [row.method]))
        elif row.method not in names:
            names.append(row.method)
    paid = text("p", " ".join(_paid_off(rows)), 'class="note"') if shared else ""
    return "".join(_curves(training, names) for training, names in shared) + paid


def _curves(training: Mapping[str, Any], names: Sequence[str]) -> str:
    history: Sequence[Mapping[str, Any]] = training["history"]
    nothing = [math.nan] * len(history)
    drawn = [
        line_chart(title, [Line("training", 1, [_known(entry.get(name)) for entry in history], nothing)], _span(name))
        for name, title in CURVES.items()
    ]
    took = (
        f"Training for {listed(names)} took {duration(float(training['seconds']))} on {training['device']} and "
        f"{short(int(training['denoiser rows']))} rows of the denoiser's network."
    )
    return text("p", took, 'class="note"') + element("div", 'class="pair"', *drawn)


def _known(value: float | None) -> float:
    """Not every training keeps an eye on everything."""
    return math.nan if value is None else float(value)


def _span(name: str) -> tuple[float, float] | None:
    return (0.0, 1.0) if name == "ess" else None


def _paid_off(rows: Sequence[Row]) -> list[str]:
    costs = {cost.name: cost for cost in costs_of(rows)}
    return [
        f"{learned.name} has paid off against {other.name} after {short(math.ceil(draws))} populations."
        for learned in costs.values()
        for other in costs.values()
        if learned.once and other.name.startswith("smc-grad") and (draws := break_even(learned, other)) is not None
    ]


@dataclass(frozen=True)
class Cost:
    """Rows of the denoiser's network and the proposal's: `once` for training, `each` for a population. Gradients count
    as further rows."""

    name: str
    once: float
    each: float


def costs_of(rows: Sequence[Row]) -> list[Cost]:
    """What a population of each row costs, and its training."""
    found: list[Cost] = []
    for row in rows:
        backward = BACKWARD if "grad" in row.family else 0
        asked = row.rows.get("denoiser", 0) + row.rows.get("proposal", 0)
        each = asked * (1 + backward) / row.populations
        once = 0.0 if row.training is None else float(row.training["denoiser rows"]) * (1 + BACKWARD)
        found.append(Cost(f"{row.method} N={row.particles}", once, each))
    return found


def break_even(learned: Cost, other: Cost) -> float | None:
    """After how many populations training has paid off, None if never."""
    saved = other.each - learned.each
    return (learned.once - other.once) / saved if saved > 0 else None
