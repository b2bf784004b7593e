"""Handwritten digits of 8 x 8 binary pixels, a small `mnist` that runs on a CPU in seconds.

    tokensteer train digits --out FOLDER

trains all its networks. The images come with the package (`data/README.md` has their source).
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

from tokensteer.tasks.common.proposals import ProposalConfig
from tokensteer.tasks.images import recipe
from tokensteer.tasks.images.recipe import CLASSES, VOCAB_SIZE, Data, Recipe
from tokensteer.tasks.nets import ConvConfig, PatchConfig, UNetConfig, ValueConfig
from tokensteer.train import Plan, ProposalPlan, StepVariance

SIDE = 8


def data() -> Data:
    """1,497 images to train on and 300 to test with."""
    return recipe.unpack(Path(__file__).parents[2] / "data" / "digits_8x8_thr8.npz", SIDE * SIDE)


RECIPE = Recipe(
    name="digits",
    side=SIDE,
    data=data,
    denoiser=UNetConfig(VOCAB_SIZE, SIDE, SIDE, channels=(32, 64), blocks=1),
    reward=ConvConfig(VOCAB_SIZE, SIDE, SIDE, CLASSES, channels=(16, 32)),
    judge=PatchConfig(VOCAB_SIZE, SIDE, SIDE, CLASSES, patch=2, hidden=48, depth=3, heads=4),
    plans=(
        Plan(1500, batch_size=64, rate=3e-3, average=0.997),
        Plan(1200, batch_size=64, rate=3e-3, average=0.995),
        Plan(6000, batch_size=64, rate=2e-3, average=0.998),
    ),
    proposal=ProposalConfig(
        ProposalPlan(200, paths=128, updates=4, times=8, replay=4, rate=1e-3, baseline_rate=3.0, average=0.97),
        StepVariance(),
        ValueConfig("unet", asdict(UNetConfig(VOCAB_SIZE, SIDE, SIDE, channels=(16, 32), blocks=1))),
        num_steps=25,
        twist=ProposalPlan(
            60, paths=64, on_policy=0.5, updates=8, times=4, replay=32, rate=2e-3, baseline_rate=1.0, average=0.99
        ),
    ),
    shift=1,
    flips=0.03,
    source="UCI Optical Recognition of Handwritten Digits (CC BY 4.0), binarised; see tokensteer/data/README.md",
)

task = partial(recipe.task, RECIPE)
