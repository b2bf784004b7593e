"""How the samples of a task are drawn in a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tokensteer.tasks.common.task import Setup


@dataclass(frozen=True)
class Image:
    """A square of binary pixels: id 0 is white, 1 is black, 2 is the mask."""

    side: int


class Mark(NamedTuple):
    """A stretch of a sequence with a name."""

    start: int
    stop: int
    name: str


@dataclass(frozen=True)
class Letters:
    """A letter for each id, and a dot for ids beyond the alphabet, such as the mask. `marks` finds stretches to point
    out, from left to right, none within another."""

    alphabet: str
    marks: Callable[[str], Sequence[Mark]] = lambda sequence: ()

    def spelt(self, ids: Sequence[int]) -> str:
        return "".join((self.alphabet + ".")[min(token, len(self.alphabet))] for token in ids)


@dataclass(frozen=True)
class Sheet:
    """Colour images of `side` x `side` pixels, as in the picture that the run wrote: a network decodes the ids."""

    side: int


@dataclass(frozen=True)
class HeatMap:
    """All samples of a run as one pmf on a grid, beside the exact target(setup). histogram(samples, weights) is the pmf
    of samples (P, 2) with weights (P,)."""

    histogram: Callable[[Tensor, Tensor], Tensor]
    target: Callable[[Setup], Tensor]


Look = Image | Letters | Sheet | HeatMap
