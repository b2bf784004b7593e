"""How the samples of a task look, for a report that knows no task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tokensteer.tasks.common.task import Setup


@dataclass(frozen=True)
class Image:
    """A square of binary pixels: id 0 is paper, 1 is ink, 2 is the mask."""

    side: int


@dataclass(frozen=True)
class Letters:
    """A letter for each id; ids beyond the alphabet, such as the mask, are dots."""

    alphabet: str


@dataclass(frozen=True)
class HeatMap:
    """All samples of a run as one pmf on a grid, beside the exact target. histogram(samples, weights) is the pmf of
    samples (P, 2) with weights (P,); target(setup) is what a run with this setup is steered to."""

    histogram: Callable[[Tensor, Tensor], Tensor]
    target: Callable[[Setup], Tensor]


Look = Image | Letters | HeatMap
