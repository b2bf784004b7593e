"""What all tasks have in common: enough to run any of them without knowing which one it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tokensteer import files
from tokensteer.core.kernels.masked import Ancestral, Cap
from tokensteer.core.models.denoiser import Denoiser
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.numerics.domains import check_wholes
from tokensteer.core.particles.result import Result
from tokensteer.core.twists.tilt import Tilt
from tokensteer.tasks.common.metrics import Measured
from tokensteer.tasks.common.settings import Settings
from tokensteer.tasks.nets import ValueNet

SHIPPED = Path(__file__).parents[2] / "weights"
"""The weights that come with the package."""


def data_folder() -> Path:
    """Where data that does not come with the package is looked for: TOKENSTEER_DATA, or the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("TOKENSTEER_DATA") or cache / "tokensteer")


def read_card(file: Path) -> dict[str, Any]:
    """The card of a network. Raises an error that names the file, and how to mend it, if it is not there or damaged."""
    mend = "train the network again, or copy the card from the folder that the network is from"
    if not file.is_file():
        raise FileNotFoundError(f"there is no card {file}: {mend}")
    try:
        card = files.read_json(file)
    except ValueError as error:
        raise ValueError(f"{error}: {mend}") from error
    if not isinstance(card, dict):
        raise ValueError(f"{file} is damaged, it is no card: {mend}")
    return cast("dict[str, Any]", card)


def check_device(name: str) -> None:
    """Say so if there is no such device here."""
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise ValueError(f"there is no device called {name}: try cpu or cuda") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"torch sees no GPU here, so the device cannot be {name}: use cpu")


@dataclass(frozen=True)
class Setup(Settings):
    """Settings with all else that a task is made of: a device, a folder of weights, and the function of texts that
    `reward` names. A task reads `goal` in its own way, and its own `kl` counts unless one is given."""

    device: str = "cpu"
    weights: Path = SHIPPED
    reward_function: Callable[[list[str]], Any] | None = None

    def __post_init__(self) -> None:
        check_wholes("Setup", 1, steps=self.steps)
        self.check()
        check_device(self.device)
        if self.reward is not None and self.reward_function is None:
            raise ValueError(f"the reward {self.reward} is a name: give the function itself as reward_function")

    @property
    def num_steps(self) -> int:
        return 100 if self.steps is None else self.steps

    def kernel(self, mask_id: int) -> Ancestral:
        """Ancestral sampling, with remasking if it was asked for."""
        return Ancestral(mask_id, sigma=Cap(self.remask)) if self.remask else Ancestral(mask_id)


@dataclass(frozen=True)
class Trained:
    """A learned proposal and its card, and the learned log-twist value(x, t) that goes with it, if there is one, with
    a card of its own unless the two were learned together."""

    denoiser: Denoiser
    value: ValueNet | None
    card: Mapping[str, Any]
    value_card: Mapping[str, Any] | None = None

    @property
    def taught(self) -> Trained:
        """The same with one card for both: what they took together, and how the twist was learned."""
        if self.value_card is None:
            return self
        took = {name: self.card[name] + self.value_card[name] for name in ("seconds", "denoiser rows")}
        return replace(self, card={**self.value_card, **took})


@dataclass(frozen=True)
class Prompt:
    """What is asked for, and the name it goes by."""

    text: str
    id: str


Failure = tuple[Prompt, str]
"""A prompt that gave nothing, and why."""


@dataclass(frozen=True)
class Prompted:
    """What a task reads prompts for: those it runs, as many populations for each, in the order of its model's
    templates; those that failed, each with the reason; and only(places, more), the same task with some of the first and
    with more of the second."""

    prompts: Sequence[Prompt]
    failed: Sequence[Failure]
    only: Callable[[Sequence[int], Sequence[Failure]], Task]


@dataclass(frozen=True)
class Task:
    """A model and what is asked of it, with the means to say how well that went.

    `judge` gives ids (P, L) a mark from 0 to 1 (P,) by other eyes than the reward's, where there are such eyes;
    `picture` writes some ids (P, L) as a PNG file, at best `pictured` of them, and `written` says by their suffixes
    which other files are made of a result, and how; `learned` finds what was trained for the task's goal; `prompted`
    is there if the task reads prompts. Some methods need more: `conditional` is the model told the goal, `uniform` one
    of the same data under uniform noise, and tuned(name) finds a denoiser that was tuned for the goal.
    """

    name: str
    about: str
    model: Diffusion
    tilt: Tilt
    metrics: Callable[[Result], Mapping[str, Measured]]
    picture: Callable[[Tensor, Path], None] | None
    judge: Callable[[Tensor], Tensor] | None = None
    pictured: int = 64
    learned: Callable[[], Trained] | None = None
    written: Mapping[str, Callable[[Result, Path], None]] = field(default_factory=dict[str, Any])
    prompted: Prompted | None = None
    conditional: Callable[[], Diffusion] | None = None
    uniform: Callable[[], Diffusion] | None = None
    tuned: Callable[[str], Trained] | None = None
