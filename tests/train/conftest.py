"""Fixtures of trainings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tokensteer.tasks.common.task import Setup, Task
from tokensteer.tasks.images import train as pixels_train


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a training measures of images is sampled in four steps, and not in a hundred."""
    make = pixels_train.task

    def quick(recipe: Any, setup: Setup) -> Task:
        return make(recipe, replace(setup, steps=min(setup.steps or 4, 4)))

    monkeypatch.setattr(pixels_train, "task", quick)
