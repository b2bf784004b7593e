"""All tasks by name: how each is made and trained, and what is known of it without weights or data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tokensteer.tasks.cifar import data as cifar_data
from tokensteer.tasks.cifar import model as cifar_model
from tokensteer.tasks.cifar import rewards as cifar_rewards
from tokensteer.tasks.cifar import task as cifar
from tokensteer.tasks.cifar import train as cifar_train
from tokensteer.tasks.common import grid
from tokensteer.tasks.common.looks import HeatMap, Image, Letters, Look, Sheet
from tokensteer.tasks.common.proposals import ProposalTraining
from tokensteer.tasks.common.settings import Settings
from tokensteer.tasks.common.task import Setup, Task
from tokensteer.tasks.common.training import Training
from tokensteer.tasks.dna import consensus, tfbind
from tokensteer.tasks.dna import data as dna_data
from tokensteer.tasks.dna import model as dna_model
from tokensteer.tasks.dna import task as dna
from tokensteer.tasks.emoji import data as emoji_data
from tokensteer.tasks.emoji import model as emoji_model
from tokensteer.tasks.emoji import proposals as emoji_proposals
from tokensteer.tasks.emoji import render as emoji_render
from tokensteer.tasks.emoji import rewards as emoji_rewards
from tokensteer.tasks.emoji import task as emoji
from tokensteer.tasks.emoji import train as emoji_train
from tokensteer.tasks.images import digits, mnist
from tokensteer.tasks.images import train as images
from tokensteer.tasks.mog import trained as mog_trained
from tokensteer.tasks.product import task as product
from tokensteer.tasks.text import model as text_model
from tokensteer.tasks.text import proposals as text_proposals
from tokensteer.tasks.text import task as text
from tokensteer.tasks.text.corpus import windows as text_windows
from tokensteer.tasks.text.prior import train as text_train


@dataclass(frozen=True)
class Entry:
    """A task: `make` it, `train` its networks, or train a `proposal` for a goal from the networks of a folder.

    The rest needs neither weights nor data: the reward in words (`rewarded`), how samples `look` in a report (as
    numbers if None), the default `method` (or `method_for` settings and a folder of weights), number of denoising
    `steps` and `kl`, how many `particles` and `populations` one run has unless it is said, the kl of each of its
    `rewards` if it has several, whether its reward may be a function of texts (`judges_texts`), and the file of `data`
    that training reads, if it does not come with the package.
    """

    make: Callable[[Setup], Task]
    rewarded: str
    look: Look | None = None
    method: str = "smc-grad"
    method_for: Callable[[Settings, Path], str] | None = None
    steps: int = 100
    kl: float = 1.0
    particles: int = 16
    populations: int = 8
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    judges_texts: bool = False
    data: str | None = None
    train: Callable[[Training], Any] | None = None
    proposal: Callable[[int | None, Path], ProposalTraining] | None = None

    def usual_method(self, settings: Settings, weights: Path) -> str:
        """The method of a run that names none."""
        return self.method if self.method_for is None else self.method_for(settings, weights)


LETTERS = Letters(dna_data.LETTERS, consensus.marks)
TASKS: dict[str, Entry] = {
    "mog": Entry(
        mog_trained.task,
        "−x²/100 − y², highest where y is near 0",
        HeatMap(grid.histogram, mog_trained.exact_pmf),
        train=mog_trained.train,
        proposal=mog_trained.proposal,
    ),
    product.NAME: Entry(
        product.task, "log-probability under a second model, a cross of stripes", HeatMap(grid.histogram, product.exact)
    ),
    "digits": Entry(
        digits.task,
        "log-probability of the digit under a classifier",
        Image(digits.SIDE),
        train=partial(images.train, digits.RECIPE),
        proposal=partial(images.proposal, digits.RECIPE),
    ),
    "mnist": Entry(
        mnist.task,
        "log-probability of the digit under a classifier",
        Image(mnist.SIDE),
        data=mnist.FILE,
        train=partial(images.train, mnist.RECIPE),
        proposal=partial(images.proposal, mnist.RECIPE),
    ),
    text_model.NAME: Entry(
        text.task,
        "log-probability of the sentiment, or of toxicity, under a classifier",
        method="smc-base",
        method_for=text.usual_method,
        steps=text_model.NUM_STEPS,
        kl=text_model.KL,
        particles=2,  # a first text within 20 seconds on two cores
        populations=1,
        rewards={name: reading.kl for name, reading in text_model.READINGS.items()},
        judges_texts=True,
        data=text_windows.FILE,
        train=text_train.train,
        proposal=text_proposals.proposal,
    ),
    "dna": Entry(
        dna.task,
        "log-probability of the cell type under a classifier",
        LETTERS,
        kl=dna_model.KL,
        rewards=dna_model.KLS,
        data=dna_data.FILE,
        train=dna.train,
        proposal=dna.proposal,
    ),
    tfbind.NAME: Entry(tfbind.task, "measured binding of the factor to the word", LETTERS, kl=tfbind.KL),
    tfbind.FITTED: Entry(tfbind.fitted_task, "measured binding of the factor to the word", LETTERS, kl=tfbind.KL),
    cifar_model.NAME: Entry(
        cifar.task,
        "log-probability of the class under a classifier of the decoded image",
        Sheet(cifar_data.SIDE),
        method="smc-cfg",
        steps=cifar_model.STEPS,
        kl=cifar_rewards.KLS[cifar_rewards.CLASS],
        particles=4,  # ten classes within two minutes on two cores
        populations=1,
        rewards=cifar_rewards.KLS,
        data=f"{cifar_data.FOLDER}/train_images.npy",
        train=cifar_train.train,
    ),
    emoji_model.NAME: Entry(
        emoji.task,
        "the cosine of the decoded image and the prompt under a network trained for it",
        Sheet(emoji_render.SIDE),
        method="smc-base",
        steps=emoji_model.STEPS,
        kl=emoji_rewards.KLS[emoji_rewards.ALIGNMENT],
        particles=4,  # six prompts within a minute or two on two cores
        populations=1,
        rewards=emoji_rewards.KLS,
        data=emoji_data.FILE,
        train=emoji_train.train,
        proposal=emoji_proposals.proposal,
    ),
}
