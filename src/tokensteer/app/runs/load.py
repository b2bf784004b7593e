"""`ts.load`: a task by its name, or a run by its folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from tokensteer.app.runs.folder import CONFIG, Run, open_run
from tokensteer.app.runs.prepare import make_task
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.task import Setup, Task


@overload
def load(what: Path) -> Run: ...
@overload
def load(what: str, **setup: Any) -> Task | Run: ...
def load(what: str | Path, **setup: Any) -> Task | Run:
    """The task of that name with its shipped networks, `load("digits", goal=3, kl=0.5)`, as `Setup` has it; or the run
    that `tokensteer run` or `compare` wrote to a folder. A name that is both is a task: give a Path for the folder."""
    if isinstance(what, str) and what in TASKS:
        return make_task(replace(Setup(), **setup), what)
    folder = Path(what)
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{what} is neither a task ({', '.join(TASKS)}) nor the folder of a run")
    if setup:
        raise ValueError(f"{what} is a run, whose settings are those it was written with: leave out {', '.join(setup)}")
    return open_run(folder)
