"""Training of a task part by part: one network at a time, in one run or in several, with a card for each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tokensteer.core.numerics.domains import check_number
from tokensteer.files import write_json
from tokensteer.tasks.common.checkpoints import Checkpoints
from tokensteer.tasks.common.task import check_device, read_card, weights_file
from tokensteer.tasks.common.timed_loop import Progress, Stretch, Trainee, run
from tokensteer.tasks.common.training import Training, say
from tokensteer.tasks.nets import load, save
from tokensteer.tasks.nets.store import Config
from tokensteer.train import Plan

SO_FAR = "quality of this part"  # until all parts are trained: cards with "quality" are those of a finished training
INT8 = "int8 by output channel, vectors bfloat16; exponential moving average of the weights"


@dataclass(frozen=True)
class Pieces:
    """A training in several runs: `resume` the checkpoint of a folder, `horizon` minutes in all of them together.
    `weights` is the folder of networks that were trained before, `out` if None; `exact` checkpoints are in float32.
    `unfinished` cards are those of a training whose other parts follow. `start` is the folder of a finished network
    to train further, at a rate that begins anew."""

    resume: Path | None = None
    horizon: float | None = None
    weights: Path | None = None
    exact: bool = False
    unfinished: bool = False
    start: Path | None = None


@dataclass(frozen=True)
class PartTraining:
    """The training of one `part` of a task; `source` describes the data on its card."""

    task: str
    parts: Sequence[str]
    part: str
    training: Training
    pieces: Pieces
    source: str

    def __post_init__(self) -> None:
        if self.part not in self.parts:
            raise ValueError(f"there is no part {self.part}: give {' or '.join(self.parts)}")
        if self.pieces.start is not None and self.part != "denoiser":
            raise ValueError(f"a denoiser alone can be trained further: leave out --start for {self.part}")
        if self.pieces.horizon is not None:
            check_number("--horizon", self.pieces.horizon, "(0, inf)", "it is the minutes of all runs together")
            if self.training.minutes is None:
                raise ValueError("--horizon is the minutes of all runs together: give those of this run as --minutes")

    def begin(self) -> None:
        """Check the device, create the folder, and seed the weights."""
        check_device(self.device)
        if torch.device(self.device).type == "cuda":
            torch.backends.cudnn.benchmark = True  # the shapes never change
            torch.set_float32_matmul_precision("high")
        self.training.begin()
        self.training.seed_torch(self.parts.index(self.part))

    @property
    def device(self) -> str:
        return self.training.device

    @property
    def compiled(self) -> bool:
        return self.device.startswith("cuda")

    def file(self, part: str) -> Path:
        """The weights of a part that was trained before."""
        return weights_file(self.pieces.weights or self.training.out, self.task, part)

    def stored(self, part: str) -> nn.Module:
        return load(self.file(part), self.device)

    def earlier(self, config: Config, **agree: Any) -> tuple[nn.Module, dict[str, Any]]:
        """The network of `pieces.start`, and the entry of cards about its own training. Raises ValueError if it has
        another configuration but for dropout, or other entries than those that must `agree`."""
        assert self.pieces.start is not None
        file = weights_file(self.pieces.start, self.task, self.part)
        net, card = load(file, self.device), read_card(file.with_suffix(".json"))
        if type(found := getattr(net, "config", None)) is not type(config) or _shape(found) != _shape(config):
            raise ValueError(f"{file} is no {self.part} of this configuration: leave out --start")
        for name, value in agree.items():
            if card.get(name) != value:
                raise ValueError(
                    f"{file} was trained with another {name}: give the folder of its own as --weights, or leave out "
                    "--start"
                )
        told = {name: card[name] for name in ("command", "seed", "steps", "seconds")}
        before = {"started from": card["started from"]} if "started from" in card else {}
        return net.requires_grad_(True).train(), {"started from": told | before}

    def run(self, trainee: Trainee, plan: Plan) -> Progress:
        """Train for the minutes of a run, or for the steps of the plan."""
        training, pieces = self.training, self.pieces
        plan = replace(plan, steps=max(1, round(plan.steps * training.scale)))
        stretch = Stretch(
            training.checkpoints,
            pieces.resume,
            None if training.minutes is None else 60 * training.minutes,
            None if pieces.horizon is None else 60 * pieces.horizon,
            compact=not pieces.exact,
        )
        generator = training.generator(self.parts.index(self.part))
        return run(trainee, plan, generator, f"{self.task}-{self.part}", stretch)

    def store(self, net: nn.Module, dtype: torch.dtype = torch.int8) -> nn.Module:
        """Write the network, and read it as it was written."""
        file = weights_file(self.training.out, self.task, self.part)
        save(net, file, dtype)
        return load(file, self.device)

    def finish(
        self,
        progress: Progress,
        net: nn.Module,
        config: Config,
        plan: Plan,
        quality: Mapping[str, Any],
        more: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Write the card, with `more` entries."""
        command = f"python -m tokensteer.tasks.{self.task} --part {self.part}"
        card = {
            **self.training.card(f"{self.part} of the task {self.task}", command, self.source),
            "steps": progress.step,
            "seconds": round(progress.seconds, 1),
            "parameters": sum(p.numel() for p in net.parameters()),
            "last": {name: round(value, 5) for name, value in progress.shown.items()},
            "config": asdict(config),
            "plan": asdict(plan),
            **more,
        }
        card[SO_FAR if self.pieces.unfinished else "quality"] = dict(quality)
        write_json(weights_file(self.training.out, self.task, self.part).with_suffix(".json"), card)
        say(f"{self.part}: {json.dumps(dict(quality))}")
        return dict(quality)


def _shape(config: Any) -> dict[str, Any]:
    """A configuration without what is of training alone."""
    return {name: value for name, value in asdict(config).items() if name != "dropout"}


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


def train_parts(
    task: str,
    shares: Mapping[str, float],
    training: Training,
    train_part: Callable[[str, Training, Pieces], Any],
    last: Callable[[], dict[str, Any]] = dict,
) -> dict[str, Any]:
    """Train, store and measure all parts, each with its share of the minutes, and then do what is `last`. A killed
    training continues if it is called with the same options. The tokeniser is fixed once the denoiser is begun."""
    training.begin()
    cards = {part: weights_file(training.out, task, part).with_suffix(".json") for part in shares}
    kept = {part: Checkpoints(training.checkpoints, f"{task}-{part}") for part in shares}
    for part, share in shares.items():
        if part == "tokeniser" and cards[part].is_file() and kept["denoiser"].load() is not None:
            continue
        minutes = None if training.minutes is None else training.minutes * share
        train_part(part, *go_on(training, kept[part], minutes))
    more = last()  # before cards are finished and checkpoints removed, so that a training killed in it continues
    found = finish_cards(cards, kept.values())
    training.tidy()
    return found | more
