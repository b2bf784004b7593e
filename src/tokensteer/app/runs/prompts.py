"""Running prompts one by one after an error with all of them, and joining their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from tokensteer.core.particles.merging import total_counts
from tokensteer.core.particles.result import Result
from tokensteer.tasks.common.task import Failure, Task

Found = TypeVar("Found")


def one_by_one(
    task: Task, attempt: Callable[[int, Task], Found], error: Exception
) -> tuple[dict[int, Found], list[Failure]]:
    """The outcome of `attempt` for each prompt alone, and the prompts for which it fails, with the reason. Raises
    `error` if there are fewer than two prompts, and the error of the last prompt if none works."""
    asked, done, failed = task.prompted, dict[int, Found](), list[Failure]()
    if asked is None or len(asked.prompts) < 2:
        raise error
    for k, prompt in enumerate(asked.prompts):
        try:
            done[k] = attempt(k, only(task, [k]))
        except Exception as own:
            if k + 1 == len(asked.prompts) and not done:
                raise
            failed.append((prompt, " ".join(str(own).split())))
    return done, failed


def only(task: Task, places: Sequence[int], failed: Sequence[Failure] = ()) -> Task:
    """The task with some of its prompts."""
    assert task.prompted is not None
    return replace(task.prompted.only(places, failed), tilt=task.tilt)


def side_by_side(results: Sequence[Result]) -> Result:
    """The populations of all results in one, whose templates are those of all."""
    found = joined([replace(result, templates=1) for result in results])
    return replace(found, templates=sum(result.templates for result in results))


def joined(results: Sequence[Result]) -> Result:
    """Results for the same templates in one: the populations of the first template, of all results, come first, and so
    on. The states are those of the first result, as far as its populations stay first."""
    if len(results) == 1:
        return results[0]
    templates = results[0].templates
    sizes = [len(result.log_w) // templates for result in results]
    first = [templates * sum(sizes[:k]) for k in range(len(sizes))]
    blocks = [range(first[k] + t * n, first[k] + (t + 1) * n) for t in range(templates) for k, n in enumerate(sizes)]
    order = torch.tensor(list(chain(*blocks)), device=results[0].log_w.device)

    def all_of(name: str, axis: int) -> Any:
        parts = [getattr(result, name) for result in results]
        return None if parts[0] is None else torch.cat(parts, axis).index_select(axis, order)

    def first_of(states: Tensor | None) -> Tensor | None:
        return None if states is None else states[:, : sizes[0]].contiguous()

    return replace(
        results[0],
        **{name: all_of(name, 0) for name in ("samples", "log_w", "reward")},
        **{name: all_of(name, 1) for name in ("ess", "mean_reward", "ancestors", "ramp")},
        rows=total_counts([result.rows for result in results]),
        saved=total_counts([result.saved for result in results]),
        states=first_of(results[0].states),
        states_log_w=first_of(results[0].states_log_w),
    )
