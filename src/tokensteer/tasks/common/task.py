"""The `Task` type: all that running a task needs, whichever it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokensteer import files
from tokensteer.core.kernels.masked import Ancestral, Cap
from tokensteer.core.kernels.schedule import uniform_steps
from tokensteer.core.models.denoiser import Denoiser
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.product import Product
from tokensteer.core.numerics.domains import check_wholes
from tokensteer.core.particles.result import Result
from tokensteer.core.proposals.amortised import Amortised, OtherHead
from tokensteer.core.twists.tilt import Tilt
from tokensteer.rewards.constraints.automaton import Automaton
from tokensteer.tasks.common.metrics import Measured
from tokensteer.tasks.common.settings import Settings
from tokensteer.tasks.nets import ValueNet, load

SHIPPED = Path(__file__).parents[2] / "weights"
"""The weights that come with the package."""


def data_folder() -> Path:
    """The folder of data that does not come with the package: TOKENSTEER_DATA, or the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("TOKENSTEER_DATA") or cache / "tokensteer")


def data_file(name: str, mend: str) -> Path:
    """A file of `data_folder`. Raises FileNotFoundError, which says how to `mend` it, if it is not there."""
    file = data_folder() / name
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}: set TOKENSTEER_DATA to the folder that holds {name}{mend}")
    return file


def weights_file(folder: Path, task: str, part: str, goal: int | None = None) -> Path:
    """The weights of one network of a task: `part` is its role, `goal` what it was trained for, if anything."""
    return folder / f"{task}-{part}{'' if goal is None else f'-{goal}'}.safetensors"


def read_card(file: Path) -> dict[str, Any]:
    """The card of a network. Raises an error with the file's name and the mend if it is missing or damaged."""
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
    """Raise if torch has no such device here."""
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise ValueError(f"there is no device called {name}: try cpu or cuda") from error
    if kind == "mps":
        raise ValueError("mps has no 64-bit numbers, in which weights are kept: use cpu, or adapters.placed in Python")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"torch sees no GPU here, so the device cannot be {name}: use cpu")


@dataclass(frozen=True)
class Setup(Settings):
    """Settings with the device, the folder of weights and, for texts, the function that `reward` names. Each task gives
    `goal` its own meaning, and its own `kl` unless one is given."""

    device: str = "cpu"
    weights: Path = SHIPPED
    reward_function: Callable[[list[str]], Any] | None = None

    def __post_init__(self) -> None:
        check_wholes("Setup", 1, steps=self.steps)
        self.check()
        check_device(self.device)

    def num_steps(self, usual: int = 100) -> int:
        """The number of denoising steps: the `usual` one of a task unless one is chosen."""
        return usual if self.steps is None else self.steps

    def refuse_reward(self, task: str) -> None:
        """Raise if a reward is chosen; for tasks that have only one."""
        if self.reward is not None or self.reward_function is not None:
            raise ValueError(
                f"{task} has only one reward, got {self.reward or 'a function'}: leave out --reward (dna has log-p and "
                "logit, text has sentiment, toxicity and functions of your own, cifar and emoji have rewards of images)"
            )

    def chosen_reward(self, task: str, rewards: Iterable[str]) -> str:
        """The reward by name, the first of the task's unless one is chosen."""
        first, *others = rewards
        if self.reward not in (None, first, *others):
            known = f"{', '.join([first, *others[:-1]])} and {others[-1]}"
            raise ValueError(f"{task} has the rewards {known}: give one of them as --reward, got {self.reward}")
        return self.reward or first

    def load(self, task: str, role: str) -> nn.Module:
        """A stored network of a task, on the device."""
        return load(weights_file(self.weights, task, role), self.device)

    def diffusion(self, denoiser: Denoiser, mask_id: int, canvas: Tensor, usual: int = 100) -> Diffusion:
        """Ancestral sampling of a canvas (L,) or canvases (C, L), with remasking if `remask` is positive, in the
        `usual` number of steps unless one is chosen."""
        kernel = Ancestral(mask_id, sigma=Cap(self.remask)) if self.remask else Ancestral(mask_id)
        return Diffusion(denoiser, kernel, uniform_steps(self.num_steps(usual)), canvas.to(self.device))


@dataclass(frozen=True)
class Trained:
    """A learned proposal `q`, a network or a head on the model's states, with its card, and its learned log-twist
    value(x, t) if it has one. `value_card` is None if the two were learned together."""

    q: Denoiser | OtherHead
    value: ValueNet | None
    card: Mapping[str, Any]
    value_card: Mapping[str, Any] | None = None

    @property
    def proposal(self) -> Amortised | OtherHead:
        """The proposal; that of a network at the scale that its training chose."""
        return self.q if isinstance(self.q, OtherHead) else Amortised(self.q, scale=self.card.get("scale", 1.0))

    @property
    def taught(self) -> Trained:
        """The same with one card: the twist's, with the seconds and denoiser rows of both."""
        if self.value_card is None:
            return self
        took = {name: self.card[name] + self.value_card[name] for name in ("seconds", "denoiser rows")}
        return replace(self, card={**self.value_card, **took})


@dataclass(frozen=True)
class Prompt:
    """A prompt and the name it has in results."""

    text: str
    id: str


Failure = tuple[Prompt, str]
"""A prompt that failed, and why."""


@dataclass(frozen=True)
class Prompted:
    """The prompts that a task runs, in the order of its model's templates and with equally many populations each, and
    those that `failed`. only(places, more) is the task with some of the first and more of the second."""

    prompts: Sequence[Prompt]
    failed: Sequence[Failure]
    only: Callable[[Sequence[int], Sequence[Failure]], Task]


@dataclass(frozen=True)
class Task:
    """A model, a target, and how results are measured and written.

    `judge` marks ids (P, L) from 0 to 1, (P,), with a network that the reward does not use. `picture` writes at
    most `pictured` of ids (P, L) as a PNG file, and `written` other files of a result by suffix. `learned` loads
    the proposal for the task's goal. Some methods need `guided`, the target as a product of models, `uniform`, a
    model of the same data under uniform noise, or tuned(name), a denoiser tuned for the goal. With `tilts_guided`
    the tilt counts beside the product. If the model itself is `guided_reference`, all methods have a guidance.
    `reward` names the reward of the tilt if it is not the task's default. If samples are texts, decode(ids) returns
    those of ids (P, L), and `piece` is the text of a token, with the space before it if it has one. `goal`, `guidance`
    and `order` are those of the setup, or the task's own where the setup has none; None if the task has no choice.
    `rule` is a hard constraint on samples, if there is one. `clip` bounds the gradient of its reward where the usual
    bound of a method does not suit it.
    """

    name: str
    about: str
    model: Diffusion
    tilt: Tilt
    metrics: Callable[[Result], Mapping[str, Measured]]
    picture: Callable[[Tensor, str | Path], None] | None
    judge: Callable[[Tensor], Tensor] | None = None
    pictured: int = 64
    learned: Callable[[], Trained] | None = None
    written: Mapping[str, Callable[[Result, Path], None]] = field(default_factory=dict[str, Any])
    prompted: Prompted | None = None
    guided: Callable[[], Product] | None = None
    tilts_guided: bool = False
    guided_reference: bool = False
    uniform: Callable[[], Diffusion] | None = None
    tuned: Callable[[str], Trained] | None = None
    reward: str | None = None
    decode: Callable[[Tensor], list[str]] | None = None
    piece: Callable[[int], str] | None = None
    goal: int | None = None
    guidance: float | None = None
    order: str | None = None
    rule: Automaton | None = None
    clip: float | None = None
