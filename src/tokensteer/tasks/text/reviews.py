"""Movie reviews of 64 tokens, towards praise or blame.

    tokensteer train text --out FOLDER --device cuda --minutes 8

trains all its networks. The data does not come with the package; `tokensteer.tasks.text.data` makes it from reviews.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

from tokensteer.tasks.common.proposals import STEPWISE, TWIST, ProposalConfig
from tokensteer.tasks.nets import AttentiveConfig, NgramConfig, TransformerConfig, ValueConfig
from tokensteer.tasks.text import data as text_data
from tokensteer.tasks.text import recipe
from tokensteer.tasks.text.data import LENGTH, SIZE
from tokensteer.tasks.text.recipe import CLASSES, KL, NUM_STEPS, Recipe
from tokensteer.train import Plan, StepVariance

__all__ = ["KL", "NUM_STEPS", "RECIPE", "task"]

RECIPE = Recipe(
    name="text",
    data=text_data.load,
    denoiser=TransformerConfig(SIZE, LENGTH, width=192, depth=6, heads=6, tied=True),
    reward=AttentiveConfig(SIZE, LENGTH, len(CLASSES), features=32, width=64, depth=2, heads=2),
    judge=NgramConfig(SIZE, len(CLASSES), features=32, spans=(1, 2, 3), channels=48),
    plans=(
        Plan(20_000, batch_size=512, rate=1.5e-3, weight_decay=0.05, average=0.9995),
        Plan(2000, batch_size=256, rate=1e-3, weight_decay=1.0, average=0.995),
        Plan(2000, batch_size=256, rate=1e-3, weight_decay=0.1, average=0.995),
    ),
    proposal=ProposalConfig(
        replace(STEPWISE, paths=240, times=6, rows=1024),  # 16 paths for each of 15 prompts; (rows, 64, V) tables
        StepVariance(),
        ValueConfig("transformer", asdict(TransformerConfig(SIZE, LENGTH, width=64, depth=2)), beside=True),
        kl=KL,
        num_steps=32,
        twist=replace(TWIST, paths=240, times=6, rows=1024),
        frozen=("tokens.weight",),
    ),
    dropped=0.4,  # with fewer gaps the classifiers learn the names of films
    swapped=0.1,
    source="33,530 reviews of films of IMDB and Rotten Tomatoes, in 8,000 of BERT's word pieces",
)

task = partial(recipe.task, RECIPE)
