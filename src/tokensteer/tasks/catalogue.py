"""All tasks by name."""

from __future__ import annotations

from collections.abc import Callable

from tokensteer.tasks import digits, mnist, mog_trained
from tokensteer.tasks.task import Setup, Task

TASKS: dict[str, Callable[[Setup], Task]] = {
    "mog": mog_trained.task,
    "digits": digits.task,
    "mnist": mnist.task,
}
