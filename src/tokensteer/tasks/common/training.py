"""What the training of all tasks has in common: what may be chosen, and the card it leaves."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

from tokensteer import files
from tokensteer.core.numerics.domains import check_seed
from tokensteer.tasks.common.task import check_device, read_card
from tokensteer.tasks.nets import save
from tokensteer.tasks.nets.store import Config, Net, build
from tokensteer.train import Fitted, Loss, Plan, fit, shown


@dataclass(frozen=True)
class Training:
    """Where weights go and how they are made: in `minutes` all together, or in `scale` times the task's own steps."""

    out: Path
    device: str = "cpu"
    seed: int = 0
    minutes: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_device(self.device)
        check_seed("--seed", self.seed)
        for name, value in (("--minutes", self.minutes), ("--scale", self.scale)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")

    def plan(self, plan: Plan, share: float = 1.0) -> Plan:
        """A task's plan, with its share of the time if there is a limit."""
        if self.minutes is not None:
            return replace(plan, steps=10**9, seconds=60.0 * self.minutes * share)
        return replace(plan, steps=max(1, round(plan.steps * self.scale)))

    def command(self, task: str) -> str:
        """What makes these weights again."""
        return f"tokensteer train {task} {self.choices()}"

    def made(self) -> dict[str, Any]:
        """Where and from which seed weights come, and how they are kept."""
        cuda = self.device.startswith("cuda")
        return {
            "seed": self.seed,
            "device": torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} thread(s)",
            "torch": torch.__version__,
            "stored": "bfloat16, exponential moving average of the weights",
        }

    def choices(self) -> str:
        """The part of a command that makes the same weights again."""
        length = f"--scale {self.scale:g}" if self.minutes is None else f"--minutes {self.minutes:g}"
        return f"--out FOLDER --device {self.device} --seed {self.seed} {length}"

    @property
    def checkpoints(self) -> Path:
        """Where runs that are not finished lie."""
        return self.out / "checkpoints"

    def begin(self) -> None:
        """Make the folder, and delete what writers that were killed have left in it."""
        self.out.mkdir(parents=True, exist_ok=True)
        for folder in (self.out, self.checkpoints):
            files.remove_strays(folder)

    def tidy(self, *names: str) -> None:
        """The networks of these files are stored, measured and have their cards: nothing is left to go on with. This
        comes last, so that a training that is killed before does not begin anew."""
        for name in names:
            (self.checkpoints / name).unlink(missing_ok=True)
        if self.checkpoints.is_dir() and not any(self.checkpoints.iterdir()):
            self.checkpoints.rmdir()

    def card(self, task: str, what: str, data: str, net: nn.Module, fitted: Fitted, plan: Plan) -> dict[str, Any]:
        return {
            "what": what,
            "data": data,
            "command": self.command(task),
            **self.made(),
            "steps": fitted.last.step,
            "seconds": round(fitted.last.seconds, 1),
            "parameters": sum(p.numel() for p in net.parameters()),
            "plan": asdict(plan),
        }


def train_net(
    training: Training,
    task: str,
    role: str,
    place: int,
    config: Config,
    loss: Loss,
    data: tuple[Tensor, Tensor | None],
    plan: Plan,
    source: str,
) -> dict[str, Any]:
    """One network of a task, from ids (D, L) and labels (D,) if the loss wants them, and its card; `place` is added to
    the seed. It is stored in half precision: all that is measured later is measured of what is stored."""
    torch.manual_seed(training.seed + place)  # pyright: ignore[reportUnknownMemberType]
    net = build(config).to(training.device)
    with shown(f"{task} {role}") as watch:
        fitted = fit(
            net,
            loss,
            *data,
            plan=plan,
            generator=Generator(training.device).manual_seed(training.seed + place),
            checkpoint=training.checkpoints / f"{task}-{role}.safetensors",
            watch=watch,
        )
    save(cast("Net", fitted.net), training.out / f"{task}-{role}.safetensors", torch.bfloat16)
    return training.card(task, f"{role} of the task {task}", source, net, fitted, plan)


def finished(cards: Iterable[Path]) -> bool:
    """Whether networks with these cards are finished: there are some, and all were measured. A training writes all its
    cards before it measures, and what was found when it has measured everything."""
    read = [read_card(card) for card in cards]
    return bool(read) and all("quality" in card for card in read)


def say(line: str) -> None:
    """Progress goes to the standard error stream."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
