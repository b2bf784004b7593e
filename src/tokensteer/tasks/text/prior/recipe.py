"""The task `text` with the larger prior: texts of 100 tokens, towards praise or blame.

`task(setup)` is the task for a folder of weights that `prior.train` wrote. `toxicity_task(setup)` is steered towards
toxic texts, or polite ones if the goal is 0.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

from tokensteer.tasks.common.arrays import Examples
from tokensteer.tasks.common.proposals import STEPWISE, TWIST, ProposalConfig
from tokensteer.tasks.common.task import data_file
from tokensteer.tasks.nets import TransformerConfig, ValueConfig
from tokensteer.tasks.text import recipe
from tokensteer.tasks.text.corpus import windows
from tokensteer.tasks.text.corpus.windows import LENGTH, SIZE
from tokensteer.tasks.text.data import Reviews
from tokensteer.tasks.text.prior import classifiers, denoiser
from tokensteer.tasks.text.recipe import KL, Recipe
from tokensteer.train import StepVariance


def load() -> Reviews:
    """The windows of the corpus, as the tasks of texts read them."""
    file = data_file(windows.FILE, ", or make it by python -m tokensteer.tasks.text --part windows")
    corpus = windows.load(file)
    parts = {name: Examples(part.ids, part.labels) for name, part in corpus.taught.items()}
    return Reviews(corpus.vocabulary, parts)


RECIPE = Recipe(
    name="text",
    data=load,
    denoiser=denoiser.CONFIG,
    reward=classifiers.REWARD,
    judge=classifiers.JUDGE,
    plans=(denoiser.PLAN, classifiers.ENCODER_PLAN, classifiers.NGRAM_PLAN),
    proposal=ProposalConfig(
        replace(STEPWISE, paths=240, times=6, rows=512),  # 16 paths for each of 15 prompts; (rows, 100, V) tables
        StepVariance(),
        ValueConfig("transformer", asdict(TransformerConfig(SIZE, LENGTH, width=64, depth=2)), beside=True),
        kl=KL,
        num_steps=32,
        twist=replace(TWIST, paths=240, times=6, rows=512),
        frozen=("tokens.weight",),
    ),
    dropped=classifiers.DROPPED,
    swapped=classifiers.SWAPPED,
    source="texts that SmolLM2-135M-Instruct wrote, and reviews of films, in 8,000 of BERT's word pieces",
)

TOXICITY = replace(RECIPE, roles=("toxicity", "toxicity-judge"), classes=("polite", "toxic"))

task = partial(recipe.task, RECIPE)
toxicity_task = partial(recipe.task, TOXICITY)
