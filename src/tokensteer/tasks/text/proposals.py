"""Learned proposals of the task `text`, for its default prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from tokensteer.tasks.common.proposals import STEPWISE, TWIST, ProposalConfig, ProposalTraining
from tokensteer.tasks.common.task import SHIPPED
from tokensteer.tasks.common.wordpiece import WordPiece
from tokensteer.tasks.nets import TransformerConfig, ValueConfig
from tokensteer.tasks.text.corpus.windows import LENGTH, SIZE
from tokensteer.tasks.text.recipe import KL, as_denoiser, load_denoiser, vocabulary_file
from tokensteer.tasks.text.task import task
from tokensteer.train import StepVariance

# Not by likelihood: a sharpened denoiser is not the denoiser of its own samples, and ESS/N fell to .1.
CONFIG = ProposalConfig(
    replace(STEPWISE, paths=240, times=6, rows=512, held_out=480, report_every=5),  # 16 paths for each of 15 prompts
    StepVariance(),
    ValueConfig("transformer", asdict(TransformerConfig(SIZE, LENGTH, width=64, depth=2)), beside=True),
    kl=KL,
    num_steps=50,
    twist=replace(TWIST, paths=240, times=6, rows=512),
    frozen=("tokens.", "places", "enter.", "layers."),
    int8=True,
)

MEASURED = {1: 75, 8: 75}  # populations for each number of particles, multiples of the number of prompts


def proposal(
    goal: int | None = None,
    weights: Path = SHIPPED,
    config: ProposalConfig = CONFIG,
    populations: Mapping[int, int] = MEASURED,
) -> ProposalTraining:
    """Training of a proposal for the goal, 1 unless given. `populations` are those of all prompts together."""
    wrap = as_denoiser(WordPiece.read(vocabulary_file(weights)).mask_id)
    return ProposalTraining(task, 1 if goal is None else goal, weights, config, wrap, populations, load_denoiser)
