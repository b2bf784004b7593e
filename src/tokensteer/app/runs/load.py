"""`ts.load`: a task by its name, or a run by its folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from tokensteer.app.runs.folder import CONFIG, Run, open_run

if TYPE_CHECKING:
    from tokensteer.tasks.common.task import Task


@overload
def load(what: str, **setup: Any) -> Task: ...
@overload
def load(what: Path) -> Run: ...
def load(what: str | Path, **setup: Any) -> Task | Run:
    """A task by its name, with its shipped networks and the settings of `Setup`: load("digits", goal=3, kl=0.5). Or the
    run that `tokensteer run` or `compare` wrote to a folder, given as a Path."""
    if isinstance(what, Path):
        if setup:
            raise ValueError(f"a run has the settings it was written with: leave out {', '.join(setup)}")
        return open_run(what)
    # Tasks load the public names, of which this is one.
    from tokensteer.app.runs.prepare import make_task
    from tokensteer.tasks.catalogue import TASKS
    from tokensteer.tasks.common.task import Setup

    if what not in TASKS and (Path(what) / CONFIG).is_file():
        raise ValueError(f"{what} is the folder of a run: give a Path, tokensteer.load(pathlib.Path({what!r}))")
    return make_task(Setup(**setup), what)
