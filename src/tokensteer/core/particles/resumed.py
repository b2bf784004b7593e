"""A path that begins in the middle, from given states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Generator, Tensor

from tokensteer.core.particles.path import Evaluation, Measure, Moved, Proposing, Step, Wrapper


@dataclass(frozen=True)
class Resumed(Wrapper[Proposing]):
    """The steps of `path` from number `first` on, renumbered from 0. The particles of population b start at x[b]; x is
    (B, L). The target is p(x_s, ..., x_0 | x_t) · exp(psi_0(x_0))."""

    path: Proposing
    first: int
    x: Tensor

    @property
    def steps(self) -> Sequence[Step]:
        return [replace(step, index=k) for k, step in enumerate(self.path.steps[self.first :])]

    def _original(self, step: Step) -> Step:
        return self.path.steps[self.first + step.index]

    def start(self, rows: int, generator: Generator | None) -> Tensor:
        return self.x.repeat_interleave(rows // len(self.x), 0)

    def evaluate(
        self, x: Tensor, t: float, generator: Generator | None, parent: Evaluation | None = None, weighed: bool = True
    ) -> Evaluation:
        return self.path.evaluate(x, t, generator, parent, weighed)

    def move(self, x: Tensor, evaluation: Evaluation, step: Step, generator: Generator | None) -> Moved:
        return self.path.move(x, evaluation, self._original(step), generator)

    def propose(self, x: Tensor, evaluation: Evaluation, step: Step) -> Measure:
        return self.path.propose(x, evaluation, self._original(step))

    def log_p(self, y: Tensor, x: Tensor, evaluation: Evaluation, step: Step, q: Measure) -> Tensor:
        return self.path.log_p(y, x, evaluation, self._original(step), q)

    def parent_of(self, evaluation: Evaluation) -> Evaluation:
        return self.path.parent_of(evaluation)
