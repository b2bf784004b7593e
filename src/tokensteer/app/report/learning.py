"""How the proposals of a run were trained, and after how many populations that has paid off."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokensteer.app.report.charts import Line, line_chart
from tokensteer.app.report.folder import Row
from tokensteer.app.report.markup import element, text
from tokensteer.app.report.words import listed
from tokensteer.app.words.numbers import duration, loaded, short

CURVES = {
    "loss": ("Loss", None),
    "ess": ("ESS/N of the proposal's paths, without resampling", (0.0, 1.0)),
    "reward": ("Reward/kl of the proposal's paths", None),
    "divergence": ("KL from the model", None),
}
"""Title and range of the chart for each entry of a training's history."""
BACKWARD = 2  # rows that a backward pass is counted as


def charts(rows: Sequence[Row]) -> str:
    """The curves of every training that methods of a task use, and when it has paid off."""
    shared: dict[str, list[Row]] = {}  # rows by their training
    for row in rows:
        if row.training is not None:
            shared.setdefault(json.dumps(row.training, sort_keys=True), []).append(row)
    paid = text("p", " ".join(_paid_off(rows)), 'class="note"') if shared else ""
    return "".join(map(_curves, shared.values())) + paid


def _curves(rows: Sequence[Row]) -> str:
    """The history of a training that the rows share."""
    training, names = rows[0].training or {}, list(dict.fromkeys(row.method for row in rows))
    history: Sequence[Mapping[str, Any]] = training["history"]
    unknown = [math.nan] * len(history)
    drawn = [
        line_chart(title, [Line("training", 0, [loaded(entry.get(name)) for entry in history], unknown)], span)
        for name, (title, span) in CURVES.items()
    ]
    took = (
        f"Training for {listed(names)} took {duration(float(training['seconds']))} on {training['device']} and "
        f"{short(int(training['denoiser rows']))} rows of the denoiser's network."
    )
    if rows[0].learned_for is not None:
        took += f" It was for {rows[0].learned_for}, not for the reward of this run."
    return text("p", took, 'class="note"') + element("div", 'class="pair"', *drawn)


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
    """Rows of the denoiser and the proposal, backward passes included: `once` for training, `each` per population."""

    name: str
    once: float
    each: float


def costs_of(rows: Sequence[Row]) -> list[Cost]:
    found: list[Cost] = []
    for row in rows:
        backward = BACKWARD if "grad" in row.family else 0
        asked = row.rows.get("denoiser", 0) + row.rows.get("proposal", 0)
        once = 0.0 if row.training is None else float(row.training["denoiser rows"]) * (1 + BACKWARD)
        found.append(Cost(f"{row.method} N={row.particles}", once, asked * (1 + backward) / row.populations))
    return found


def break_even(learned: Cost, other: Cost) -> float | None:
    """After how many populations training has paid off, None if never."""
    saved = other.each - learned.each
    return (learned.once - other.once) / saved if saved > 0 else None
