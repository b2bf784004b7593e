"""Networks of `dna` that are trained for a cell type: a proposal, its twist, and two denoisers tuned by DRAKES."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from tokensteer.core.numerics.domains import check_wholes
from tokensteer.core.steering.methods import pretrained
from tokensteer.files import write_json
from tokensteer.tasks.common import learned
from tokensteer.tasks.common.proposals import STEPWISE, TWIST, ProposalConfig, ProposalTraining, taught_card
from tokensteer.tasks.common.task import SHIPPED, Setup, Task, Trained, read_card, weights_file
from tokensteer.tasks.common.training import Training, say
from tokensteer.tasks.dna.data import LENGTH, VOCAB_SIZE
from tokensteer.tasks.dna.model import KL, NAME, as_denoiser, cell_of
from tokensteer.tasks.nets import Dilated, DilatedConfig, ValueConfig, load, save
from tokensteer.train import DrakesPlan, StepVariance, fit_drakes, shown

Make = Callable[[Setup], Task]
MEASURED = {1: 200, 4: 60, 16: 30}  # populations for each number of particles
PROPOSAL = ProposalConfig(
    replace(STEPWISE, rounds=120, anneal=0.3),
    StepVariance(),
    ValueConfig("dilated", asdict(DilatedConfig(VOCAB_SIZE, LENGTH, 64, 5, (1, 2, 4, 8, 16))), beside=True),
    kl=KL,
    twist=TWIST,
)


def without_dropout(file: Path, device: str) -> Dilated:
    """A copy of the stored denoiser to train without dropout: it must draw from the distribution whose probabilities
    weight its draws."""
    net = cast("Dilated", load(file, device))
    copy = Dilated(replace(net.config, dropout=0.0)).to(device)
    copy.load_state_dict(net.state_dict())
    return copy


def proposal(
    make: Make,
    goal: int | None = None,
    weights: Path = SHIPPED,
    populations: Mapping[int, int] = MEASURED,
    config: ProposalConfig = PROPOSAL,
) -> ProposalTraining:
    """Training of a proposal for a cell type, HepG2 unless given."""
    return ProposalTraining(make, cell_of(goal), weights, config, as_denoiser, populations, without_dropout)


@dataclass(frozen=True)
class Drakes:
    """A plan of DRAKES, and the number of steps of the sampler that it tunes."""

    plan: DrakesPlan
    num_steps: int = 64

    def __post_init__(self) -> None:
        check_wholes("Drakes", 1, num_steps=self.num_steps)


TUNED: dict[str, Drakes] = {
    "drakes": Drakes(DrakesPlan(300, paths=64, last=32, rate=1e-4, average=0.95)),
    "drakes-kl": Drakes(DrakesPlan(300, paths=64, last=32, kl=KL, rate=1e-4, average=0.95)),
}
"""Without and with a KL term to the model, at the kl of the task; gradients flow through the last half of the steps."""


def find_tuned(folder: Path, name: str, cell: int, device: str) -> Trained:
    """A denoiser that was tuned for a cell type, with its card."""
    file = weights_file(folder, NAME, name, cell)
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
    """Tune a copy of the denoiser in `weights` by each plan, with an equal share of the time, and measure samples of
    it. The cards are written and returned."""
    cell, cards = cell_of(goal), dict[str, Any]()
    learned.complete(training, weights, NAME)
    files = {name: weights_file(training.out, NAME, name, cell) for name in tuned}
    for name, how in tuned.items():
        task = make(Setup(how.num_steps, cell, device=training.device, weights=weights))
        plan = training.rounds(how.plan, 1 / len(tuned))
        training.seed_torch()
        with shown(f"{NAME} {name}") as watch:
            done = fit_drakes(
                task.model,
                task.tilt.reward,
                without_dropout(weights_file(weights, NAME, "denoiser"), training.device),
                as_denoiser,
                plan=plan,
                generator=training.generator(),
                checkpoint=training.checkpoints / files[name].name,
                watch=watch,
                about={"goal": cell, "weights": learned.fingerprint(weights, NAME)},
            )
        save(done.net, files[name], torch.bfloat16)
        what = f"denoiser of the task {NAME}, tuned by the gradient of the reward through the sampler ({name})"
        command = f"python -m tokensteer.tasks.{NAME} --drakes --goal {cell}"
        card = taught_card(training, what, command, cell, how.num_steps, plan, done.history, done.rows)
        say(f"measuring {name}")
        used = make(Setup(100, cell, device=training.device, weights=weights))
        sampler = pretrained(replace(used.model, denoiser=as_denoiser(load(files[name], training.device))))
        result = sampler(1, populations, generator=training.generator(200))
        card["quality"] = {key: value.numbers() for key, value in used.metrics(result).items()}
        say(f"{name}: {json.dumps(card['quality'])}")
        write_json(files[name].with_suffix(".json"), card)
        cards[name] = card
    training.tidy(*(file.name for file in files.values()))
    return cards
