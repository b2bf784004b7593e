"""One part of a training that is done in several parts, each in one run or in several."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from tokensteer.files import write_json
from tokensteer.tasks.common.checkpoints import Checkpoints
from tokensteer.tasks.common.task import read_card, weights_file
from tokensteer.tasks.common.timed_loop import Progress, Stretch, Trainee, run
from tokensteer.tasks.common.training import Training, say
from tokensteer.train import Plan

SO_FAR = "quality of this part"  # until all parts are trained: cards with "quality" are those of a finished training
INT8 = "int8 by output channel, vectors bfloat16; exponential moving average of the weights"


@dataclass(frozen=True)
class Pieces:
    """A training in several runs: `resume` the checkpoint of a folder, `horizon` minutes in all of them together.
    `weights` is the folder of a tokeniser, `out` if None; `exact` checkpoints are in float32.
    `unfinished` cards are those of a training whose other parts follow."""

    resume: Path | None = None
    horizon: float | None = None
    weights: Path | None = None
    exact: bool = False
    unfinished: bool = False


@dataclass(frozen=True)
class Part:
    """A part of the training of a task, the one at `place` among its parts."""

    task: str
    name: str
    place: int
    training: Training
    pieces: Pieces

    @property
    def file(self) -> Path:
        """Where its network is stored."""
        return weights_file(self.training.out, self.task, self.name)

    @property
    def compiled(self) -> bool:
        return self.training.device.startswith("cuda")

    def run(self, trainee: Trainee, plan: Plan) -> Progress:
        training, pieces = self.training, self.pieces
        plan = replace(plan, steps=max(1, round(plan.steps * training.scale)))
        stretch = Stretch(
            training.checkpoints,
            pieces.resume,
            None if training.minutes is None else 60 * training.minutes,
            None if pieces.horizon is None else 60 * pieces.horizon,
            compact=not pieces.exact,
        )
        return run(trainee, plan, training.generator(self.place), f"{self.task}-{self.name}", stretch)

    def finish(
        self, net: nn.Module, progress: Progress | None, data: str, more: Mapping[str, Any], quality: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Write the card of a network, with `more` entries; `data` tells what it was trained on."""
        command = f"python -m tokensteer.tasks.{self.task} --part {self.name}"
        card = self.training.card(f"{self.name} of the task {self.task}", command, data)
        if progress is not None:
            last = {name: round(value, 5) for name, value in progress.shown.items()}
            card |= {"steps": progress.step, "seconds": round(progress.seconds, 1), "last": last}
        card |= {"parameters": sum(p.numel() for p in net.parameters()), **more}
        card[SO_FAR if self.pieces.unfinished else "quality"] = dict(quality)
        write_json(self.file.with_suffix(".json"), card)
        say(f"{self.name}: {json.dumps(dict(quality))}")
        return dict(quality)


def go_on(training: Training, kept: Checkpoints | None, minutes: float | None) -> tuple[Training, Pieces]:
    """What is left of a part that takes `minutes` in a training of all parts, from its checkpoint if it has one."""
    left = None if kept is None else kept.load()
    resume = None if left is None else training.checkpoints
    pieces = Pieces(resume, minutes, exact=training.device == "cpu", unfinished=True)
    if minutes is not None and left is not None:
        minutes = max(1e-3, minutes - left[1]["seconds"] / 60)
    return replace(training, minutes=minutes), pieces


def finish_cards(cards: Mapping[str, Path], kept: Iterable[Checkpoints]) -> dict[str, Any]:
    """Mark the cards of all parts as finished and remove the checkpoints; returns what was measured."""
    found: dict[str, Any] = {}
    for part, card in cards.items():
        entries = read_card(card)
        found[part] = entries.pop(SO_FAR, None) or entries["quality"]  # a part that was trained by itself has "quality"
        write_json(card, {**entries, "quality": found[part]})
    for checkpoints in kept:
        checkpoints.remove()
    return found
