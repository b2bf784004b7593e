"""Where learned proposals and twists lie, with the networks they go with, and how they are found again."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import cast

from torch import nn

from tokensteer.core.models.denoiser import Denoiser
from tokensteer.core.twists.learned import LearnedTwist
from tokensteer.core.twists.tilt import Tilt
from tokensteer.files import copy
from tokensteer.tasks.common.task import SHIPPED, Trained, read_card
from tokensteer.tasks.common.training import Training
from tokensteer.tasks.nets import ValueNet, load

PARTS = ("proposal", "value")


def file_of(folder: Path, task: str, part: str, goal: int | None) -> Path:
    """The weights of a part, `proposal` or `value`, for the goal it was trained for."""
    return folder / f"{task}-{part}{suffix(goal)}.safetensors"


def suffix(goal: int | None) -> str:
    return "" if goal is None else f"-{goal}"


def find(
    folder: Path, task: str, goal: int | None, as_denoiser: Callable[[nn.Module], Denoiser], device: str
) -> Trained:
    """What was trained for this goal, with its card."""
    file, twist = (file_of(folder, task, part, goal) for part in PARTS)
    if not file.is_file():
        known = sorted(file.stem for file in folder.glob(f"{task}-proposal*.safetensors"))
        model = "" if folder == SHIPPED else f" --weights {shlex.quote(str(folder))}"
        raise FileNotFoundError(
            f"there is no {file.name} in the weights (there: {', '.join(known) or 'none'}): train it by "
            f"tokensteer train {task} --proposal{towards(goal)}{model} --out FOLDER, and give --weights FOLDER"
        )
    net = load(file, device, folder / f"{task}-denoiser.safetensors")
    card = read_card(file.with_suffix(".json"))
    if not twist.is_file():
        return Trained(as_denoiser(net), None, card)
    its = read_card(twist.with_suffix(".json"))
    together = its.get("history") == card.get("history")
    return Trained(as_denoiser(net), cast("ValueNet", load(twist, device)), card, None if together else its)


def with_twist(tilt: Tilt, trained: Trained) -> Tilt:
    """The same target led to by the learned twist, or by that and the tilt's own."""
    if trained.value is None:
        raise ValueError(
            "no twist was learned with this proposal: use smc-amot, or teach it one by tokensteer train TASK --twist"
        )
    twist = LearnedTwist(trained.value, ignores_time=trained.value.ignores_time)
    return twist.beside(tilt) if trained.value.config.beside else twist.on(tilt)


def towards(goal: int | None) -> str:
    return "" if goal is None else f" --goal {goal}"


def complete(training: Training, weights: Path, name: str) -> None:
    """Begin in a folder, which is only of use with the networks that a proposal goes with: they are copied there."""
    training.begin()
    for file in _base(weights, name):
        bring(file, training.out)


def _base(weights: Path, name: str) -> list[Path]:
    """The files of a task that are not of proposals and twists."""
    return [f for f in sorted(weights.glob(f"{name}-*")) if "-proposal" not in f.stem and "-value" not in f.stem]


def bring(file: Path, out: Path) -> None:
    """Copy a file to a folder that lacks it. One that is there must be the same if it is part of a network: what is
    taught with one denoiser is of no use with another."""
    there = out / file.name
    if not there.exists():
        copy(file, there)
    elif _made_of(file) and there.read_bytes() != file.read_bytes():
        raise ValueError(
            f"{there} is not the same as {file}, which is taught here: give --weights {out} to teach what is there, or "
            "give --out another folder"
        )


def _made_of(file: Path) -> bool:
    """Whether a file is part of what is taught: neither a card, nor counts of data, nor something tuned."""
    return file.suffix in (".safetensors", ".txt") and not any(part in file.stem for part in ("-drakes", "-reference"))


def contents(weights: Path, name: str, *more: str) -> str:
    """By what the networks of a task in a folder are known again, and the files `more`: a digest."""
    used = [file for file in _base(weights, name) if _made_of(file)]
    digest = hashlib.sha256()
    for file in (*used, *(weights / f"{name}-{part}.safetensors" for part in more)):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]
