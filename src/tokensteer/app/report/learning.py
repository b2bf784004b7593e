"""How the proposals of a run were learned, and when that has paid off."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokensteer.app.numbers import duration, short
from tokensteer.app.report.charts import Line, line_chart
from tokensteer.app.report.folder import Row
from tokensteer.app.report.markup import element, text

CURVES = {
    "loss": "Loss",
    "ess": "ESS/N of the proposal's paths, without resampling",
    "reward": "Reward/kl of the proposal's paths",
    "divergence": "KL from the model",
}
BACKWARD = 2
"""Rows that a backward pass is counted as."""


def charts(rows: Sequence[Row]) -> str:
    """The curves of the training that the learned methods of a task share, if there are any."""
    training = next((row.training for row in rows if row.training is not None), None)
    if training is None:
        return ""
    history: Sequence[Mapping[str, Any]] = training["history"]
    nothing = [math.nan] * len(history)
    drawn = [
        line_chart(title, [Line("training", 1, [float(entry[name]) for entry in history], nothing)], _span(name))
        for name, title in CURVES.items()
    ]
    return _words(rows, training) + element("div", 'class="pair"', *drawn)


def _span(name: str) -> tuple[float, float] | None:
    return (0.0, 1.0) if name == "ess" else None


def _words(rows: Sequence[Row], training: Mapping[str, Any]) -> str:
    took = (
        f"Training took {duration(float(training['seconds']))} on {training['device']} and "
        f"{short(int(training['denoiser rows']))} rows of the denoiser's network."
    )
    costs = {cost.name: cost for cost in costs_of(rows)}
    said = [
        f"{learned.name} has paid off against {other.name} after {short(math.ceil(draws))} populations."
        for learned in costs.values()
        for other in costs.values()
        if learned.once and other.name.startswith("smc-grad") and (draws := break_even(learned, other)) is not None
    ]
    return text("p", " ".join([took, *said]), 'class="note"')


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
