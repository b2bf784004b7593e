"""The learned proposal of `emoji`: low-rank matrices beside those of the denoiser, one set for all captions.

    tokensteer train emoji --proposal --weights FOLDER --device cuda --out FOLDER

As in the paper, the variance of the log-weights of whole paths is made small, here among the paths of each caption:
captions have normalisers of their own. With --objective likelihood the weighted samples of each caption are learned
from instead, in many more updates. The captions are those of drawings that the denoiser was trained on, read from the
file of drawings. The reward grows to its full size over the first half of the rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from torch import nn

from tokensteer.tasks.common.objectives import NONE
from tokensteer.tasks.common.proposals import ProposalConfig, ProposalTraining
from tokensteer.tasks.common.task import SHIPPED
from tokensteer.tasks.emoji import data
from tokensteer.tasks.emoji import denoiser as denoising
from tokensteer.tasks.emoji.data import TRAIN, Drawings
from tokensteer.tasks.emoji.model import GUIDANCE, NAME, STEPS, as_grid, as_guided
from tokensteer.tasks.emoji.rewards import ALIGNMENT, KLS
from tokensteer.tasks.emoji.states import CaptionEncoder, load_encoder
from tokensteer.tasks.emoji.task import task
from tokensteer.tasks.emoji.towers import one_of_each
from tokensteer.tasks.nets import TransformerConfig, ValueConfig, load
from tokensteer.tasks.nets.grid_transformer import adapted
from tokensteer.train import Likelihood, PathVariance, ProposalPlan

RANK = 8
CAPTIONS = 64
PLAN = ProposalPlan(
    480, paths=2 * CAPTIONS, rate=1e-3, average=0.98, anneal=0.5, rows=512, report_every=20, save_every=80
)
"""Two paths of each caption, the fewest that have a variance, so that there are many updates."""
SAMPLED = replace(
    PLAN, rounds=40, paths=32 * CAPTIONS, updates=50, replay=6, average=0.998, report_every=2, save_every=8
)
"""For likelihood: eight paths of four times as many captions, and fifty updates from each round and the last few."""
CONFIG = ProposalConfig(
    PLAN,
    PathVariance(),
    ValueConfig("transformer", asdict(TransformerConfig(denoising.CONFIG.vocab_size, 256, width=64, depth=2))),
    kl=KLS[ALIGNMENT],
    num_steps=STEPS // 2,
    frozen=("tokens.", "places", "blocks.", "skips.", "norm.", "modulation.", "head.", "context.", "coarse."),
    baseline=NONE,
    among=("path-variance", "likelihood"),
    sampled=SAMPLED,
)
MEASURED = {1: 24, 8: 24}  # populations for each number of particles, multiples of the number of prompts


def proposal(
    goal: int | None = None,
    weights: Path = SHIPPED,
    config: ProposalConfig = CONFIG,
    populations: Mapping[int, int] = MEASURED,
) -> ProposalTraining:
    """Training of a proposal for all captions, from paths of some of them."""
    if goal is not None:
        raise ValueError(f"{NAME} draws what prompts say and has no goals: leave out --goal")

    def trainee(file: Path, device: str) -> nn.Module:
        return adapted(as_grid(load(file, device)), RANK)

    def captions(config: ProposalConfig) -> tuple[str, ...]:
        own, each = weights / data.FILE, 8 if isinstance(config.objective, Likelihood) else 2
        drawings = data.read(own if own.is_file() else None)
        return captions_of(drawings, config.plan.paths // each, load_encoder(weights))

    return ProposalTraining(
        task,
        None,
        weights,
        config,
        as_guided(GUIDANCE),
        populations,
        trainee,
        steps=STEPS,
        prompts=captions,
    )


def captions_of(drawings: Drawings, count: int, encoder: CaptionEncoder) -> tuple[str, ...]:
    """Captions of drawings of different concepts that were trained on, in all their forms that are read whole."""
    some = one_of_each(drawings.part(TRAIN), count)
    whole = [[text for text in forms if not encoder.cut(text)] for forms in some.captions()]
    return tuple(forms[k % len(forms)] for k, forms in enumerate(whole) if forms)
