"""Movie reviews, 64 tokens long, of which praise or blame is asked.

    tokensteer train text --out FOLDER --device cuda --minutes 8

trains all its networks. The data does not come with the package; `tokensteer.tasks.text.data` makes it from reviews.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from tokensteer.tasks.common.proposals import TWIST, ProposalConfig
from tokensteer.tasks.common.task import Setup, Task
from tokensteer.tasks.common.training import Training
from tokensteer.tasks.nets import AttentiveConfig, NgramConfig, TransformerConfig, ValueConfig
from tokensteer.tasks.text import data as text_data
from tokensteer.tasks.text import recipe as texts
from tokensteer.tasks.text import train as texts_train
from tokensteer.tasks.text.data import LENGTH, SIZE
from tokensteer.tasks.text.recipe import CLASSES, KL, NUM_STEPS, Recipe
from tokensteer.train import Plan, ProposalPlan, StepVariance

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
    course=ProposalConfig(
        ProposalPlan(
            80,
            paths=240,  # sixteen for each prompt
            updates=4,
            times=6,
            replay=4,
            rate=3e-4,
            baseline_rate=3.0,
            average=0.95,
            rows=1024,  # a law over the vocabulary at each of 64 sites is held for each
            report_every=2,
            save_every=20,
        ),
        StepVariance(),
        ValueConfig("transformer", asdict(TransformerConfig(SIZE, LENGTH, width=64, depth=2)), beside=True),
        kl=KL,
        num_steps=32,
        twist=replace(TWIST, paths=240, times=6, rows=1024),  # paths for each of fifteen prompts
        frozen=("tokens.weight",),
    ),
    dropped=0.4,  # films have names, and with fewer gaps the names are learned instead of the words
    swapped=0.1,
    source="33,530 reviews of films of IMDB and Rotten Tomatoes, in 8,000 of BERT's word pieces",
)


def task(setup: Setup | None = None) -> Task:
    """Towards praise, or blame if `setup.goal` is 0, of the prompts that `setup.prompts` holds."""
    return texts.task(RECIPE, Setup(NUM_STEPS) if setup is None else setup)


def train(training: Training) -> None:
    """Make all its weights, with cards and figures."""
    texts_train.train(RECIPE, training)
