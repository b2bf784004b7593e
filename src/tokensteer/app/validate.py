"""Names and numbers of a command, checked before anything heavy is imported. Importing this module loads no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from importlib.util import find_spec

from tokensteer.app.options import Command, Compare, Completion, List, Run, Train, Where
from tokensteer.app.words import names
from tokensteer.app.words.lookup import check_known, unknown
from tokensteer.tasks.common.settings import Settings, check_count


def validate(command: Command) -> None:
    """Raise ValueError for a name that does not exist, with the nearest one."""
    if isinstance(command, Run | Compare) and command.where.force and command.where.resume:
        raise ValueError("--resume keeps the run that is in the folder and --force replaces it: give one of the two")
    if isinstance(command, Run | Compare):
        _workers(command.where)
    match command:
        case Run():
            check_known(command.task, names.TASKS, "task")
            check_known(command.method, names.METHODS, "method")
            _settings(command.settings)
            _reward(command.task, command.settings.reward)
        case Compare():
            check_known(command.task, names.TASKS, "task")
            for method in (*(command.methods or ()), command.match_rows):
                check_known(method, names.METHODS, "method")
            check_known(command.recipe, names.RECIPES, "recipe")
            _settings(command.settings)
            _reward(command.task, command.settings.reward)
        case Train():
            check_known(command.task, names.TASKS, "task")
            check_known(command.objective, names.OBJECTIVES + names.TWISTS, "objective")
            check_known(command.baseline, names.BASELINES, "baseline")
            if command.task in names.NAMED_REWARDS:
                check_known(command.reward, names.NAMED_REWARDS[command.task], "reward")
        case List():
            check_known(command.what, names.LISTS, "list")
        case Completion():
            check_known(command.shell, names.SHELLS, "completion")
        case _:
            pass


def _workers(where: Where) -> None:
    check_count("workers", where.workers, names.MOST_WORKERS, 2)
    remote = where.ray is not None or (where.workers or 1) > 1
    if where.gpus_per_worker is not None:
        if not 0 <= where.gpus_per_worker < math.inf:
            raise ValueError(f"--gpus-per-worker must be 0 or more and finite, got {where.gpus_per_worker:g}; try 1")
        if not remote:
            raise ValueError("--gpus-per-worker is for several workers: give --workers or --ray too, or leave it out")
    if remote and find_spec("ray") is None:
        raise ImportError("several workers need Ray: pip install 'tokensteer[ray]'")
    if remote and where.device.startswith("cuda:"):
        raise ValueError(f"each worker sees its own GPU as cuda: give --device cuda instead of {where.device}")


def _settings(settings: Settings) -> None:
    settings.check()
    _with_number(settings.ramp, names.RAMPS, names.RAMPS_WITH_NUMBER, "ramp")
    _with_number(settings.trigger, names.TRIGGERS, names.TRIGGERS_WITH_NUMBER, "trigger")
    check_known(settings.resample, names.SCHEMES, "resampling scheme")
    check_known(settings.noise, names.NOISES, "noise")


def _reward(task: str, reward: str | None) -> None:
    """Raise unless a task with several rewards has this one, or takes functions and it is one. Tasks with one reward
    refuse it themselves."""
    known = names.NAMED_REWARDS.get(task, ())
    own = task == "text" and reward is not None and ":" in reward
    if reward is not None and known and reward not in known and not own:
        mend = "give one of them as --reward" + (", or a function as FILE.py:FUNCTION" if task == "text" else "")
        raise ValueError(f"{task} has the rewards {', '.join(known[:-1])} and {known[-1]}: {mend}, got {reward}")


def _with_number(text: str | None, plain: Iterable[str], numbered: Mapping[str, str], what: str) -> None:
    """Raise unless a text is one of the names, or one that takes a number, with a colon after it."""
    if text is not None and text not in plain:
        name, colon, _ = text.partition(":")
        if not colon or name not in numbered:
            raise ValueError(unknown(text, [*plain, *numbered.values()], what))
