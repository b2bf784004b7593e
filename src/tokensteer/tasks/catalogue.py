"""All tasks by name, and how the weights of each are made."""

from __future__ import annotations

from collections.abc import Callable

from tokensteer.tasks import digits, mnist, mog_trained
from tokensteer.tasks.task import Setup, Task
from tokensteer.tasks.training import Training

TASKS: dict[str, Callable[[Setup], Task]] = {
    "mog": mog_trained.task,
    "digits": digits.task,
    "mnist": mnist.task,
}

TRAINERS: dict[str, Callable[[Training], None]] = {
    "mog": mog_trained.train,
    "digits": digits.train,
    "mnist": mnist.train,
}
