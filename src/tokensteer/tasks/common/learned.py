"""Files of learned proposals and twists: where they are, which networks they belong to, how they are loaded."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import cast

from torch import nn

from tokensteer.core.models.denoiser import Denoiser
from tokensteer.core.proposals.amortised import OtherHead
from tokensteer.core.twists.learned import LearnedTwist
from tokensteer.core.twists.tilt import Tilt
from tokensteer.files import copy
from tokensteer.tasks.common.task import SHIPPED, Trained, read_card, weights_file
from tokensteer.tasks.common.training import Training
from tokensteer.tasks.nets import ValueNet, load


def named(part: str, reward: str | None) -> str:
    """The name of a learned part: with that of the reward, unless it is the task's own."""
    return part if reward is None else f"{reward}-{part}"


def find(
    folder: Path,
    task: str,
    goal: int | None,
    as_used: Callable[[nn.Module], Denoiser | OtherHead],
    device: str,
    reward: str | None = None,
) -> Trained:
    """The proposal that was trained for this goal and reward, or for the task's own reward if there is none, its twist
    if there is one, and their cards."""
    if reward is not None and not weights_file(folder, task, named("proposal", reward), goal).is_file():
        reward, wanted = None, f" --reward {reward}"
    else:
        wanted = ""
    file, twist = (weights_file(folder, task, named(part, reward), goal) for part in ("proposal", "value"))
    if not file.is_file():
        known = sorted(file.stem for file in folder.glob(f"{task}-*proposal*.safetensors"))
        model = wanted if folder == SHIPPED else f"{wanted} --weights {shlex.quote(str(folder))}"
        raise FileNotFoundError(
            f"there is no {file.name} in the weights (there: {', '.join(known) or 'none'}): train it by "
            f"tokensteer train {task} --proposal{goal_option(goal)}{model} --out FOLDER, and give --weights FOLDER"
        )
    net = load(file, device, weights_file(folder, task, "denoiser"))
    card = read_card(file.with_suffix(".json"))
    if not twist.is_file():
        return Trained(as_used(net), None, card)
    its = read_card(twist.with_suffix(".json"))
    together = its.get("history") == card.get("history")
    return Trained(as_used(net), cast("ValueNet", load(twist, device)), card, None if together else its)


def with_twist(tilt: Tilt, trained: Trained) -> Tilt:
    """The same target with the learned twist, in place of the tilt's own or beside it."""
    if trained.value is None:
        raise ValueError("no twist was learned with this proposal: use smc-amot, or run tokensteer train TASK --twist")
    twist = LearnedTwist(trained.value, ignores_time=trained.value.ignores_time)
    return twist.beside(tilt) if trained.value.config.beside else twist.on(tilt)


def goal_option(goal: int | None) -> str:
    return "" if goal is None else f" --goal {goal}"


def complete(training: Training, weights: Path, name: str) -> None:
    """Begin in a folder, and copy the task's other networks to it: a proposal cannot be used without them."""
    training.begin()
    for file in _base(weights, name):
        bring(file, training.out)


def _base(weights: Path, name: str) -> list[Path]:
    """The files of a task that belong to no proposal or twist, and are no data that only training reads."""
    others = ("-proposal", "-value", "-states")
    return [f for f in sorted(weights.glob(f"{name}-*")) if not any(part in f.stem for part in others)]


def bring(file: Path, out: Path) -> None:
    """Copy a file to a folder that lacks it. Raises ValueError if the folder has another network by that name: a
    proposal belongs to one denoiser."""
    there = out / file.name
    if not there.exists():
        copy(file, there)
    elif _is_network(file) and there.read_bytes() != file.read_bytes():
        raise ValueError(
            f"{there} is not the same as {file}, which is trained here: give --weights {out} to train what is there, "
            "or give --out another folder"
        )


def _is_network(file: Path) -> bool:
    """Weights or a vocabulary, but no card, no counts of data and no tuned denoiser."""
    return file.suffix in (".safetensors", ".txt") and not any(part in file.stem for part in ("-drakes", "-reference"))


def fingerprint(weights: Path, name: str, *more: Path) -> str:
    """A digest of the networks of a task in a folder, and of the files `more`."""
    digest = hashlib.sha256()
    for file in (*filter(_is_network, _base(weights, name)), *more):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]
