"""The task `text` with the larger prior: texts of 100 tokens, towards praise or blame.

`task(setup)` is the task for a folder of weights that `prior.train` wrote. With the reward `toxicity` it is steered
towards toxic texts, or polite ones if the goal is 0.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

from tokensteer.tasks.common.arrays import Examples
from tokensteer.tasks.common.proposals import TWIST, ProposalConfig
from tokensteer.tasks.common.task import data_file
from tokensteer.tasks.nets import TransformerConfig, ValueConfig
from tokensteer.tasks.text import recipe
from tokensteer.tasks.text.corpus import windows
from tokensteer.tasks.text.corpus.windows import LENGTH, SIZE
from tokensteer.tasks.text.data import Reviews
from tokensteer.tasks.text.prior import classifiers, denoiser
from tokensteer.tasks.text.recipe import KL, Recipe
from tokensteer.train import Likelihood, ProposalPlan


def load() -> Reviews:
    """The windows of the corpus, as the tasks of texts read them."""
    file = data_file(windows.FILE, ", or make it by python -m tokensteer.tasks.text --part windows")
    corpus = windows.load(file)
    parts = {name: Examples(part.ids, part.labels) for name, part in corpus.taught.items()}
    return Reviews(corpus.vocabulary, parts)


PLAN = ProposalPlan(
    60,
    paths=960,  # 64 for each of 15 prompts
    on_policy=0.5,
    updates=50,
    replay=60,
    rate=3e-4,
    average=0.99,
    rows=512,
    held_out=480,
    report_every=5,
    save_every=20,
)

RECIPE = Recipe(
    name="text",
    data=load,
    denoiser=denoiser.CONFIG,
    reward=classifiers.REWARD,
    judge=classifiers.JUDGE,
    plans=(denoiser.PLAN, classifiers.ENCODER_PLAN, classifiers.NGRAM_PLAN),
    proposal=ProposalConfig(
        PLAN,
        Likelihood(batch_size=512),
        ValueConfig("transformer", asdict(TransformerConfig(SIZE, LENGTH, width=64, depth=2)), beside=True),
        kl=KL,
        num_steps=50,
        twist=replace(TWIST, paths=240, times=6, rows=512),
        frozen=("tokens.", "places", "enter.", "layers."),
        int8=True,
    ),
    dropped=classifiers.DROPPED,
    swapped=classifiers.SWAPPED,
    readings={
        "sentiment": recipe.SENTIMENT,
        "toxicity": recipe.Reading("toxicity", "toxicity-judge", ("polite", "toxic")),
    },
    source="texts that SmolLM2-135M-Instruct wrote, and reviews of films, in 8,000 of BERT's word pieces",
)

task = partial(recipe.task, RECIPE)
