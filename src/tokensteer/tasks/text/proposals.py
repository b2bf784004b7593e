"""Learned proposals of the task `text`, from the texts of the corpus, labelled by the reward.

    tokensteer train text --proposal --goal 1 --device cuda --minutes 2 --out FOLDER

The windows of the corpus lie beside the weights, or in TOKENSTEER_DATA. With --objective proposals are learned from
paths instead, for the default prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

from tokensteer.core.kernels.ranked import LeftToRight
from tokensteer.core.kernels.schedule import uniform_steps
from tokensteer.tasks.common.metrics import in_parts
from tokensteer.tasks.common.proposals import STEPWISE, TWIST, ProposalConfig, ProposalTraining
from tokensteer.tasks.common.task import SHIPPED, Task, weights_file
from tokensteer.tasks.common.training import Training, say
from tokensteer.tasks.common.wordpiece import WordPiece
from tokensteer.tasks.nets import Encoder, TransformerConfig, ValueConfig
from tokensteer.tasks.text.corpus import windows
from tokensteer.tasks.text.corpus.windows import LENGTH, SIZE
from tokensteer.tasks.text.prior import published
from tokensteer.tasks.text.recipe import KL, NUM_STEPS, as_denoiser, load_denoiser, vocabulary_file
from tokensteer.tasks.text.task import task
from tokensteer.train import Learned, Plan, Progress, ProposalPlan, StepVariance, fit, shown
from tokensteer.train.contrast import Contrasted, ContrastLoss, States

CONFIG = ProposalConfig(
    replace(STEPWISE, paths=240, times=6, rows=512, held_out=480, report_every=5),  # 16 paths for each of 15 prompts
    StepVariance(),
    ValueConfig("transformer", asdict(TransformerConfig(SIZE, LENGTH, width=64, depth=2)), beside=True),
    kl=KL,
    num_steps=NUM_STEPS,
    twist=replace(TWIST, paths=240, times=6, rows=512),
    frozen=("tokens.", "places", "enter.", "layers.", *(f"blocks.{k}." for k in range(3))),
    int8=True,
)
PLAN = Plan(1200, batch_size=512, rate=3e-4, warmup=0.05, weight_decay=0.0, average=0.995)
RARE = 0.3
"""The least share of texts with the label 1 among those that are learned from."""

MEASURED = {1: 75, 8: 75}  # populations for each number of particles, multiples of the number of prompts


def proposal(
    goal: int | None = None,
    weights: Path = SHIPPED,
    config: ProposalConfig = CONFIG,
    populations: Mapping[int, int] = MEASURED,
    plan: Plan = PLAN,
) -> ProposalTraining:
    """Training of a proposal for the goal, 1 unless given. `populations` are those of all prompts together."""
    wrap = as_denoiser(WordPiece.read(vocabulary_file(weights)).mask_id)
    return FromTexts(
        task, 1 if goal is None else goal, weights, config, wrap, populations, load_denoiser, contrast=plan
    )


@dataclass(frozen=True)
class FromTexts(ProposalTraining):
    """The training of a proposal from labelled texts by the plan `contrast`, or from paths if an objective is named."""

    contrast: Plan = PLAN

    @property
    def from_texts(self) -> bool:
        return "--objective" not in self.config.options and "--baseline" not in self.config.options

    def _fit(
        self, task: Task, net: nn.Module, config: ProposalConfig, plan: ProposalPlan, training: Training, part: str
    ) -> Learned:
        if part == "twist" or not self.from_texts:
            return super()._fit(task, net, config, plan, training, part)
        assert isinstance(net, Encoder)
        training.seed_torch()
        generator, device = training.generator(), training.device
        model = self.trainee(weights_file(self.weights, task.name, "denoiser"), device)
        ids, labels, often = examples(task, self.weights / windows.FILE, generator)
        ones = float(labels.double().mean())
        chance = ones / (ones + often * (1 - ones))
        say(f"{len(ids):,} texts, {chance:.3f} with the label 1, each of which is there {often} times")
        mask_id = task.model.kernel.mask_id
        loss = ContrastLoss(cast("Encoder", model), states(net.config.length, device), mask_id, often)
        with shown(f"{task.name} {part}") as watch:
            fitted = fit(
                Contrasted(net, net.config.width, chance).to(device),
                loss,
                ids,
                labels,
                plan=training.plan(self.contrast),
                generator=generator,
                checkpoint=self._file(training.checkpoints, task.name, part),
                watch=watch,
            )
        learned, state = cast("Contrasted", fitted.net).requires_grad_(False).children()
        rows = 2 * fitted.last.step * self.contrast.batch_size
        last = Progress(**asdict(fitted.last), ess=math.nan, reward=math.nan, divergence=math.nan)  # no paths
        return Learned(learned, self.as_denoiser(learned), state, [last], rows)

    def _card(
        self, name: str, training: Training, plan: ProposalPlan, config: ProposalConfig, learned: Learned, twist: bool
    ) -> dict[str, Any]:
        card = super()._card(name, training, plan, config, learned, twist)
        if twist or not self.from_texts:
            return card
        said = {"data": "texts of the task's corpus, labelled by its reward", "plan": asdict(self.contrast)}
        return card | said | {"objective": "contrast (tokensteer.train.contrast)", "baseline": "none"}


def examples(task: Task, own: Path, generator: Generator) -> tuple[Tensor, Tensor, int]:
    """Texts of the corpus, in the file `own` beside the weights or in the data folder, their labels, 1 with probability
    exp(r/kl), and how often those with 1 are repeated, if they are rare."""
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
    ids, device = windows.joined(corpus.taught[part] for part in windows.PARTS[1:]).ids, generator.device
    reward = in_parts(lambda part: task.tilt.reward(part.to(device).long()).cpu(), ids).double()
    if reward.max() > 0:
        raise ValueError("labels need a reward that is nowhere positive: give --objective step-variance")
    y = (reward / task.tilt.kl).exp()
    labels = torch.bernoulli(y.to(device), generator=generator).bool().cpu()
    if not labels.any() or labels.all():
        raise ValueError("the texts of the corpus all have the same label: choose another --goal or --reward")
    share = float(labels.double().mean())
    times = max(1, round(RARE / (1 - RARE) * (1 - share) / share))
    rows = torch.cat([labels.nonzero().flatten().repeat(times), (~labels).nonzero().flatten()])
    return ids[rows], labels[rows].long(), times


def states(length: int, device: str) -> States:
    """States on the way from left to right, in the usual number of steps or in one for each site."""
    opened: list[Tensor] = []
    coming: list[Tensor] = []
    for num_steps in (NUM_STEPS, length):
        kernel, x = LeftToRight(0), torch.zeros(1, length, dtype=torch.long)
        for step in uniform_steps(num_steps):
            chosen = kernel.choose(x, torch.zeros(1, length, 1), step)
            opened, coming = [*opened, x == 1], [*coming, chosen]
            x = x.masked_fill(chosen, 1)
    before, then = torch.cat(opened).to(device), torch.cat(coming).to(device)

    def drawn(rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
        index = torch.randint(len(before), (rows,), generator=generator, device=before.device)
        return before[index], then[index]

    return drawn
