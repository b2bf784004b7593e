"""Fixtures of trainings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tokensteer.tasks.common.task import Task
from tokensteer.tasks.images import train as pixels_train
from tokensteer.tasks.mog import trained as mog_trained


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a training measures is sampled in four steps, and not in a hundred."""
    for module in (pixels_train, mog_trained):

        def quick(*parts: Any, make: Any = module.task) -> Task:
            *recipe, setup = parts
            return make(*recipe, replace(setup, steps=min(setup.num_steps(), 4)))

        monkeypatch.setattr(module, "task", quick)
