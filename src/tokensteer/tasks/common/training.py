"""The course of every training: train the networks of a task, store them, measure what was stored, write cards."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor

from tokensteer import files
from tokensteer.core.numerics.domains import check_seed, check_wholes
from tokensteer.core.particles.result import Result
from tokensteer.core.steering.methods import Method
from tokensteer.files import write_json
from tokensteer.tasks.common.task import Task, check_device, read_card, weights_file
from tokensteer.tasks.nets import save
from tokensteer.tasks.nets.store import Config, build
from tokensteer.train import DrakesPlan, Loss, Plan, ProposalPlan, fit, shown

Rounds = TypeVar("Rounds", ProposalPlan, DrakesPlan)


@dataclass(frozen=True)
class Training:
    """Where weights go and how long training takes: `minutes` in total, or `scale` times the steps of each plan."""

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

    def plan(self, plan: Plan, share: float = 1.0, capped: bool = False) -> Plan:
        """A plan with its share of the minutes, or scaled; `capped` plans end after their steps in any case."""
        steps = max(1, round(plan.steps * self.scale))
        if self.minutes is None:
            return replace(plan, steps=steps)
        return replace(plan, steps=steps if capped else 10**9, seconds=60.0 * self.minutes * share)

    def rounds(self, plan: Rounds, share: float = 1.0) -> Rounds:
        """`plan` for plans that count rounds."""
        if self.minutes is None:
            return replace(plan, rounds=max(1, round(plan.rounds * self.scale)))
        return replace(plan, rounds=10**9, seconds=60.0 * self.minutes * share)

    def generator(self, place: int = 0) -> Generator:
        return Generator(self.device).manual_seed(self.seed + place)

    def seed_torch(self, place: int = 0) -> None:
        """Seed torch's own generator, which draws initial weights and dropout."""
        torch.manual_seed(self.seed + place)  # pyright: ignore[reportUnknownMemberType]

    def card(self, what: str, command: str, data: str) -> dict[str, Any]:
        """The first entries of a card. `command` has the words before the options that reproduce the weights."""
        length = f"--scale {self.scale:g}" if self.minutes is None else f"--minutes {self.minutes:g}"
        cuda = self.device.startswith("cuda")
        return {
            "what": what,
            "data": data,
            "command": f"{command} --out FOLDER --device {self.device} --seed {self.seed} {length}",
            "seed": self.seed,
            "device": torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} thread(s)",
            "torch": torch.__version__,
            "stored": "bfloat16, exponential moving average of the weights",
        }

    @property
    def checkpoints(self) -> Path:
        """The folder of unfinished runs."""
        return self.out / "checkpoints"

    def begin(self) -> None:
        """Create the folder, and remove temporary files that killed processes left in it."""
        self.out.mkdir(parents=True, exist_ok=True)
        for folder in (self.out, self.checkpoints):
            files.remove_strays(folder)

    def tidy(self, *names: str) -> None:
        """Remove checkpoints. Call this last: a training that is killed before it continues, one after it restarts."""
        for name in names:
            (self.checkpoints / name).unlink(missing_ok=True)
        if self.checkpoints.is_dir() and not any(self.checkpoints.iterdir()):
            self.checkpoints.rmdir()


@dataclass(frozen=True)
class Network:
    """One network to train on ids (D, L), with labels (D,) if its loss reads them; `card` has more entries for its
    card."""

    config: Config
    loss: Loss
    plan: Plan
    ids: Tensor
    labels: Tensor | None = None
    card: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def train(self, training: Training, task: str, role: str, place: int, source: str) -> dict[str, Any]:
        """Train and store the network; returns its card. `place` is added to the seed. Weights are stored in half
        precision, and everything measured later is measured on the stored weights."""
        training.seed_torch(place)
        net = build(self.config).to(training.device)
        file = weights_file(training.out, task, role)
        with shown(f"{task} {role}") as watch:
            fitted = fit(
                net,
                self.loss,
                self.ids,
                self.labels,
                plan=self.plan,
                generator=training.generator(place),
                checkpoint=training.checkpoints / file.name,
                watch=watch,
            )
        save(fitted.net, file, torch.bfloat16)
        return {
            **training.card(f"{role} of the task {task}", f"tokensteer train {task}", source),
            "steps": fitted.last.step,
            "seconds": round(fitted.last.seconds, 1),
            "parameters": sum(p.numel() for p in net.parameters()),
            "plan": asdict(self.plan),
            **self.card,
        }


def train_networks(
    training: Training,
    task: str,
    source: str,
    networks: Mapping[str, Network],
    measure: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """Train the networks of a task by role; returns what measure() finds of each role in the stored weights. A killed
    training continues if it is called with the same options."""
    out = training.out
    cards = {role: weights_file(out, task, role).with_suffix(".json") for role in networks}
    training.begin()
    written: dict[str, dict[str, Any]] = {}
    for place, (role, network) in enumerate(networks.items()):
        written[role] = network.train(training, task, role, place, source)
    for role, card in written.items():  # without "quality": see `finished`
        write_json(cards[role], card)
    say("measuring")
    found = measure()
    for role in networks:
        say(f"{role}: {json.dumps(found[role])}")
    if len(found) > 1:
        write_json(out / f"{task}-quality.json", found)
    for role, file in cards.items():
        write_json(file, written[role] | {"quality": found[role]})
    training.tidy(*(file.with_suffix(".safetensors").name for file in cards.values()))
    return found


def finished(cards: Iterable[Path]) -> bool:
    """Whether there are cards and all have "quality", which a training adds when it has measured everything."""
    read = [read_card(card) for card in cards]
    return bool(read) and all("quality" in card for card in read)


@dataclass(frozen=True)
class Trial:
    """How much is measured: `samples` of the model, `populations` of each method, at most `examples` of each part of
    the data. Standard errors need at least 2 of each."""

    samples: int = 1000
    populations: int = 30
    examples: int = 10_000
    num_steps: int = 100

    def __post_init__(self) -> None:
        check_wholes("Trial", 2, **vars(self))


def measure_methods(
    task: Task, methods: Mapping[str, Method], populations: Mapping[int, int], training: Training
) -> Iterator[tuple[str, Result, dict[str, Any]]]:
    """Run each method with each number of particles, for so many `populations`, all from the same seed. Yields a name,
    the result, and its metrics and costs."""
    for name, method in methods.items():
        for particles, many in populations.items():
            began = time.perf_counter()
            result = method(particles, many, generator=training.generator(200))
            log_z, error = result.pooled_log_z
            found = {key: value.numbers() for key, value in task.metrics(result).items()} | {
                "populations": many,
                "log_z": [log_z, error if math.isfinite(error) else None],
                "rows": dict(result.rows),
                "seconds": round(time.perf_counter() - began, 2),
            }
            say(f"{name} N={particles}: {json.dumps(found)}")
            yield f"{name} N={particles}", result, found


def say(line: str) -> None:
    """Write a line to the standard error stream."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
