"""All tasks by name: how each is made and trained, and what is known of it before it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokensteer.tasks.common.looks import HeatMap, Image, Letters, Look
from tokensteer.tasks.common.task import Setup, Task
from tokensteer.tasks.common.training import Training
from tokensteer.tasks.dna import data as dna_data
from tokensteer.tasks.dna import task as dna
from tokensteer.tasks.dna import tfbind
from tokensteer.tasks.images import digits, mnist
from tokensteer.tasks.images import train as pixels_train
from tokensteer.tasks.mog import exact as mog
from tokensteer.tasks.mog import trained as mog_trained
from tokensteer.tasks.text import data as text_data
from tokensteer.tasks.text import reviews as text
from tokensteer.tasks.text import train as texts_train

Teach = Callable[[Training, int | None, Path], Any]
"""Training for a goal, from the networks of a folder."""


@dataclass(frozen=True)
class Entry:
    """A task: `make` it, `train` its networks, `teach` them a proposal and perhaps a twist, or a `twist` alone.

    The rest is needed without weights or data: how its samples `look` (as numbers if None), its denoising `steps`, and
    the file of `data` that training reads, where that does not come with the package.
    """

    make: Callable[[Setup], Task]
    look: Look | None = None
    steps: int = 100
    data: str | None = None
    train: Callable[[Training], None] | None = None
    teach: Teach | None = None
    twist: Teach | None = None


TASKS: dict[str, Entry] = {
    "mog": Entry(
        mog_trained.task,
        HeatMap(mog.histogram, mog_trained.exact_pmf),
        train=mog_trained.train,
        teach=mog_trained.train_proposal,
    ),
    "digits": Entry(
        digits.task,
        Image(digits.SIDE),
        train=digits.train,
        teach=partial(pixels_train.train_proposal, digits.RECIPE),
        twist=partial(pixels_train.train_proposal, digits.RECIPE, twist=True),
    ),
    "mnist": Entry(
        mnist.task,
        Image(mnist.SIDE),
        data=mnist.FILE,
        train=mnist.train,
        teach=partial(pixels_train.train_proposal, mnist.RECIPE),
        twist=partial(pixels_train.train_proposal, mnist.RECIPE, twist=True),
    ),
    "text": Entry(
        text.task,
        steps=text.NUM_STEPS,
        data=text_data.FILE,
        train=text.train,
        teach=partial(texts_train.train_proposal, text.RECIPE),
        twist=partial(texts_train.train_proposal, text.RECIPE, twist=True),
    ),
    "dna": Entry(
        dna.task,
        Letters(dna_data.LETTERS),
        data=dna_data.FILE,
        train=dna.train,
        teach=dna.learn,
        twist=dna.learn_twist,
    ),
    tfbind.NAME: Entry(tfbind.task, Letters(dna_data.LETTERS)),
    tfbind.FITTED: Entry(tfbind.fitted_task, Letters(dna_data.LETTERS)),
}
