"""What is taught to the networks of `dna` for a cell type: a proposal, its twist, and two denoisers tuned by DRAKES."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Generator

from tokensteer.core.numerics.domains import check_wholes
from tokensteer.core.steering.methods import pretrained
from tokensteer.files import write_json
from tokensteer.tasks.common import learned
from tokensteer.tasks.common.proposals import TWIST, ProposalConfig, rounded, teach, teach_twist, thinned
from tokensteer.tasks.common.task import SHIPPED, Setup, Task, Trained, read_card
from tokensteer.tasks.common.training import Training, say
from tokensteer.tasks.dna.data import LENGTH, VOCAB_SIZE
from tokensteer.tasks.dna.model import KL, NAME, as_denoiser, cell_of, file_of
from tokensteer.tasks.nets import Dilated, DilatedConfig, ValueConfig, load, save
from tokensteer.tasks.nets.store import Net
from tokensteer.train import DrakesPlan, ProposalPlan, StepVariance, Tuned, fit_drakes, shown

Make = Callable[[Setup], Task]
MEASURED = {1: 200, 4: 60, 16: 30}

COURSE = ProposalConfig(
    ProposalPlan(
        120,
        paths=128,
        updates=4,
        times=12,
        replay=4,
        anneal=0.3,
        rate=3e-4,
        baseline_rate=3.0,
        average=0.95,
        report_every=2,
        save_every=20,
    ),
    StepVariance(),
    ValueConfig("dilated", asdict(DilatedConfig(VOCAB_SIZE, LENGTH, 64, 5, (1, 2, 4, 8, 16))), beside=True),
    kl=KL,
    twist=TWIST,
)


def student(weights: Path, device: str) -> Dilated:
    """A copy of the denoiser that learns without dropout: what it draws with must be what its draws are weighed by."""
    net = cast("Dilated", load(file_of("denoiser", weights), device))
    copy = Dilated(replace(net.config, dropout=0.0)).to(device)
    copy.load_state_dict(net.state_dict())
    return copy


def train_proposal(
    make: Make,
    training: Training,
    goal: int | None = None,
    weights: Path = SHIPPED,
    populations: Mapping[int, int] = MEASURED,
    course: ProposalConfig = COURSE,
    twist: bool = False,
) -> dict[str, Any]:
    """Teach a copy of the denoiser in `weights` to draw sites of a cell type, or the proposal there its `twist`; then
    measure so many `populations` for each number of particles."""
    cell = cell_of(goal)

    def made(kl: float | None, num_steps: int) -> Task:
        return make(Setup(num_steps, cell, kl, device=training.device, weights=weights))

    if twist:
        return teach_twist(made, as_denoiser, course, training, cell, populations, weights)
    net = student(weights, training.device)
    return teach(made, net, as_denoiser, course, training, cell, populations, weights)


# ---- DRAKES


@dataclass(frozen=True)
class Drakes:
    """How the denoiser is tuned: in so many steps of the sampler, of which gradients go back through the last half."""

    plan: DrakesPlan
    num_steps: int = 64

    def __post_init__(self) -> None:
        check_wholes("Drakes", 1, num_steps=self.num_steps)


TUNED: dict[str, Drakes] = {
    "drakes": Drakes(DrakesPlan(300, paths=64, last=32, rate=1e-4, average=0.95)),
    "drakes-kl": Drakes(DrakesPlan(300, paths=64, last=32, kl=KL, rate=1e-4, average=0.95)),
}
"""Without and with what holds the sampler near the model, at the kl of the task."""


def find_tuned(folder: Path, name: str, cell: int, device: str) -> Trained:
    """A denoiser that was tuned for a cell type, with its card."""
    file = learned.file_of(folder, NAME, name, cell)
    if not file.is_file():
        raise FileNotFoundError(
            f"there is no {file.name} in the weights: make it by python -m tokensteer.tasks.{NAME} --drakes "
            f"--goal {cell} --out FOLDER, and give --weights FOLDER"
        )
    return Trained(as_denoiser(load(file, device)), None, read_card(file.with_suffix(".json")))


def train_drakes(
    make: Make,
    training: Training,
    goal: int | None = None,
    weights: Path = SHIPPED,
    populations: int = 200,
    tuned: Mapping[str, Drakes] = TUNED,
) -> dict[str, Any]:
    """Tune a copy of the denoiser in `weights` in each way, with an equal share of the time; then measure so many
    samples of each. The cards are returned and written."""
    cell, cards = cell_of(goal), dict[str, Any]()
    learned.complete(training, weights, NAME)
    for name, how in tuned.items():
        task = make(Setup(how.num_steps, cell, device=training.device, weights=weights))
        plan = replace(how.plan, rounds=max(1, round(how.plan.rounds * training.scale)))
        if training.minutes is not None:
            plan = replace(plan, rounds=10**9, seconds=60.0 * training.minutes / len(tuned))
        stored = learned.file_of(training.out, NAME, name, cell)
        checkpoint = training.checkpoints / stored.name
        torch.manual_seed(training.seed)  # pyright: ignore[reportUnknownMemberType]
        with shown(f"{NAME} {name}") as watch:
            done = fit_drakes(
                task.model,
                task.tilt.reward,
                student(weights, training.device),
                as_denoiser,
                plan=plan,
                generator=Generator(training.device).manual_seed(training.seed),
                checkpoint=checkpoint,
                watch=watch,
                about={"goal": cell, "weights": learned.contents(weights, NAME)},
            )
        save(cast("Net", done.net), stored, torch.bfloat16)
        cards[name] = _card(name, training, plan, how, done, cell)
        say(f"measuring {name}")
        used = make(Setup(100, cell, device=training.device, weights=weights))
        sampler = pretrained(replace(used.model, denoiser=as_denoiser(load(stored, training.device))))
        result = sampler(1, populations, generator=Generator(training.device).manual_seed(training.seed + 200))
        cards[name]["quality"] = {key: value.numbers() for key, value in used.metrics(result).items()}
        say(f"{name}: {json.dumps(cards[name]['quality'])}")
        write_json(stored.with_suffix(".json"), cards[name])
    training.tidy(*(learned.file_of(training.out, NAME, name, cell).name for name in tuned))
    return cards


def _card(name: str, training: Training, plan: DrakesPlan, how: Drakes, done: Tuned, cell: int) -> dict[str, Any]:
    last = done.history[-1]
    return {
        "what": f"denoiser of the task {NAME}, tuned by the gradient of the reward through the sampler ({name})",
        "command": f"python -m tokensteer.tasks.{NAME} --drakes --goal {cell} {training.choices()}",
        "data": "no data: paths of the task's own denoiser, judged by its reward",
        **training.made(),
        "goal": cell,
        "steps of a path": how.num_steps,
        "rounds": last.step,
        "seconds": round(last.seconds, 1),
        "denoiser rows": done.rows,
        "plan": asdict(plan),
        "history": [rounded(entry) for entry in thinned(done.history)],
    }
