"""Learned proposals of the task `text`, from the texts of the corpus that the target accepts.

    tokensteer train text --proposal --goal 1 --reward toxicity --device cuda --out FOLDER

A proposal is a change of the denoiser's hidden states, below the same head: a few thousand numbers. The windows of the
corpus lie beside the weights, or in TOKENSTEER_DATA. With --objective proposals are learned from paths instead, for the
default prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokensteer.core.kernels.ranked import LeftToRight
from tokensteer.core.kernels.schedule import uniform_steps
from tokensteer.core.models.denoiser import Denoiser
from tokensteer.core.proposals.amortised import Amortised
from tokensteer.core.steering.steering import Steering
from tokensteer.tasks.common.metrics import in_parts
from tokensteer.tasks.common.objectives import NONE
from tokensteer.tasks.common.proposals import STEPWISE, TWIST, ProposalConfig, ProposalTraining, rounded
from tokensteer.tasks.common.task import SHIPPED, Task
from tokensteer.tasks.common.training import Training, say
from tokensteer.tasks.common.wordpiece import WordPiece
from tokensteer.tasks.nets import Encoder, TransformerConfig, ValueConfig
from tokensteer.tasks.text.corpus import windows
from tokensteer.tasks.text.corpus.windows import LENGTH, SIZE
from tokensteer.tasks.text.model import (
    KL,
    NUM_STEPS,
    as_denoiser,
    as_head,
    load_denoiser,
    sharpened,
    vocabulary_file,
    with_change,
)
from tokensteer.tasks.text.prior import published
from tokensteer.tasks.text.prompts import CHOOSING
from tokensteer.tasks.text.task import task
from tokensteer.train import Learned, Plan, Progress, ProposalPlan, fit, shown
from tokensteer.train.accepted import Accepted, NextTokens, States, accepted
from tokensteer.train.held_out import held_out

UNITS = 4
"""Of the change: with 16 and 64 the effective sample size was lower (docs/results/learned.md)."""
PLAN = Plan(300, batch_size=2048, rate=2e-3, average=0.98)
CONFIG = ProposalConfig(
    replace(STEPWISE, paths=240, times=6, rows=512, held_out=480, report_every=5),  # 16 paths for each of 15 prompts
    Accepted(PLAN),
    ValueConfig("transformer", asdict(TransformerConfig(SIZE, LENGTH, width=64, depth=2)), beside=True),
    kl=KL,
    num_steps=NUM_STEPS,
    twist=replace(TWIST, paths=240, times=6, rows=512),
    frozen=("tokens.", "places", "enter.", "layers.", "blocks.", "last.", "norm.", "head."),
)
FEW = 1000  # accepted texts, below which the user is told
PROMPTS = (1, 2, 3)  # tokens at the beginning of a text that are given

MEASURED = {1: 75, 8: 75}  # populations for each number of particles, multiples of the number of prompts


def proposal(
    goal: int | None = None,
    weights: Path = SHIPPED,
    config: ProposalConfig = CONFIG,
    populations: Mapping[int, int] = MEASURED,
    units: int = UNITS,
) -> ProposalTraining:
    """Training of a proposal for the goal, 1 unless given. `populations` are those of all prompts together."""
    mask_id = WordPiece.read(vocabulary_file(weights)).mask_id

    def trainee(file: Path, device: str) -> nn.Module:
        return with_change(load_denoiser(file, device), units)

    return FromTexts(
        task,
        1 if goal is None else goal,
        weights,
        config,
        as_denoiser(mask_id),
        populations,
        trainee,
        as_used=as_head,
        steps=config.num_steps,
    )


@dataclass(frozen=True)
class FromTexts(ProposalTraining):
    """The training of a proposal from the texts of the corpus that the target accepts, or from paths if another
    objective is named."""

    def _fit(
        self, task: Task, net: nn.Module, config: ProposalConfig, plan: ProposalPlan, training: Training, part: str
    ) -> Learned:
        if not isinstance(config.objective, Accepted):
            return super()._fit(task, net, config, plan, training, part)
        own, mask_id = config.objective.plan, task.model.kernel.mask_id
        training.seed_torch()
        generator, device = training.generator(), training.device
        ids, tried = examples(task, self.weights / windows.FILE, training)
        few = "; with so few a proposal learns little: try a larger --kl" if len(ids) < FEW else ""
        say(f"{len(ids):,} of {tried:,} texts are accepted{few}")
        with shown(f"{task.name} {part}") as watch:
            fitted = fit(
                net,
                NextTokens(states(cast("Encoder", net).config.length, config.num_steps, device), mask_id),
                ids,
                plan=training.plan(own, capped=True),
                generator=generator,
                checkpoint=self._file(training.checkpoints, task.name, part),
                watch=watch,
            )
        learned = fitted.net.requires_grad_(False)
        rows = fitted.last.step * own.batch_size
        last = Progress(**asdict(fitted.last), ess=math.nan, reward=math.nan, divergence=math.nan)  # no paths
        return Learned(learned, self.as_denoiser(learned), nn.Identity(), [last], rows)

    def _finished(self, name: str, training: Training) -> nn.Module:
        return sharpened(cast("Encoder", super()._finished(name, training)))

    def held_out_entries(
        self, task: Task, denoiser: Denoiser, plan: ProposalPlan, training: Training
    ) -> dict[str, Any]:
        """All that was learned counts. How even weights are with it, and with the model alone, for prompts on which
        settings are chosen."""
        tried = self._task(training, self.config.num_steps, CHOOSING)
        steering, paths, generator = Steering(tried.model, tried.tilt), 4 * plan.paths, training.generator()
        found = {
            "model": held_out(steering, paths, generator),
            "proposal": held_out(replace(steering, proposal=Amortised(denoiser)), paths, generator),
        }
        for name, trial in found.items():
            say(f"other prompts, {name}: ESS/N {trial.ess:.3f}, log Z {trial.log_z:.2f} ± {trial.error:.2f}")
        return {"held-out paths": paths, "held out": {name: rounded(asdict(trial)) for name, trial in found.items()}}

    def _card(
        self, name: str, training: Training, plan: ProposalPlan, config: ProposalConfig, learned: Learned, twist: bool
    ) -> dict[str, Any]:
        card = super()._card(name, training, plan, config, learned, twist)
        learns = sum(value.numel() for part, value in learned.net.named_parameters() if part.startswith("change."))
        card["parameters"] = card["parameters"] | {"learned": learns}
        if not isinstance(config.objective, Accepted):
            return card
        said = {"data": "texts of the task's corpus that its target accepts", "plan": asdict(config.objective.plan)}
        return card | said | {"objective": "likelihood (tokensteer.train.accepted)", "baseline": NONE}


def examples(task: Task, own: Path, training: Training) -> tuple[Tensor, int]:
    """Texts of the corpus, in the file `own` beside the weights or in the data folder, that the target accepts, and how
    many were tried."""
    try:
        corpus = windows.load(own if own.is_file() else published.find(windows.FILE))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}; python -m tokensteer.tasks.text --part windows makes it, and with --objective step-variance a "
            "proposal learns from paths instead"
        ) from error
    if corpus.vocabulary.pieces != WordPiece.read(vocabulary_file(own.parent)).pieces:
        raise ValueError(
            f"the corpus {windows.FILE} has another vocabulary than {own.parent}: give the --weights it is of"
        )
    ids = windows.Windows.joined(corpus.taught[part] for part in windows.PARTS[1:]).ids
    reward = in_parts(lambda part: task.tilt.reward(part.to(training.device).long()).cpu(), ids).double()
    kept = accepted((reward / task.tilt.kl).to(training.device), training.generator()).cpu()
    return ids[kept], len(ids)


def states(length: int, num_steps: int, device: str) -> States:
    """States on the way from left to right in so many steps, after prompts of a few tokens."""
    opened: list[Tensor] = []
    coming: list[Tensor] = []
    for given in PROMPTS:
        kernel, x = LeftToRight(0), (torch.arange(length) < given).long().unsqueeze(0)
        for step in uniform_steps(num_steps):
            chosen = kernel.choose(x, torch.zeros(1, length, 1), step)
            opened, coming = [*opened, x == 1], [*coming, chosen]
            x = x.masked_fill(chosen, 1)
    before, then = torch.cat(opened).to(device), torch.cat(coming).to(device)

    def drawn(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        index = torch.randint(len(before), (rows,), generator=generator, device=before.device)
        return before[index], then[index]

    return drawn
