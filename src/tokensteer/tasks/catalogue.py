"""All tasks by name, and how the weights of each are made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tokensteer.tasks.common.task import Setup, Task
from tokensteer.tasks.common.training import Training
from tokensteer.tasks.dna import task as dna
from tokensteer.tasks.dna import tfbind
from tokensteer.tasks.images import digits, mnist
from tokensteer.tasks.images import train as pixels_train
from tokensteer.tasks.mog import trained as mog_trained
from tokensteer.tasks.text import reviews as text
from tokensteer.tasks.text import train as texts_train

TASKS: dict[str, Callable[[Setup], Task]] = {
    "mog": mog_trained.task,
    "digits": digits.task,
    "mnist": mnist.task,
    "text": text.task,
    "dna": dna.task,
    tfbind.NAME: tfbind.task,
    tfbind.FITTED: tfbind.fitted_task,
}

TRAINERS: dict[str, Callable[[Training], None]] = {
    "mog": mog_trained.train,
    "digits": digits.train,
    "mnist": mnist.train,
    "text": text.train,
    "dna": dna.train,
}

TWISTERS: dict[str, Callable[[Training, int | None, Path], Any]] = {
    "digits": partial(pixels_train.train_proposal, digits.RECIPE, twist=True),
    "mnist": partial(pixels_train.train_proposal, mnist.RECIPE, twist=True),
    "text": partial(texts_train.train_proposal, text.RECIPE, twist=True),
    "dna": dna.learn_twist,
}
"""How a twist is learned for a proposal that is there."""

LEARNERS: dict[str, Callable[[Training, int | None, Path], Any]] = {
    "mog": mog_trained.train_proposal,
    "digits": partial(pixels_train.train_proposal, digits.RECIPE),
    "mnist": partial(pixels_train.train_proposal, mnist.RECIPE),
    "text": partial(texts_train.train_proposal, text.RECIPE),
    "dna": dna.learn,
}
"""How a proposal, and perhaps a twist, is learned for a goal, from the networks of a folder."""

STEPS: dict[str, int] = {"text": text.NUM_STEPS}
"""Denoising steps of a task, where they are not a hundred."""
