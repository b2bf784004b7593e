"""Resample before propagating, when the proposal is locally optimal.

With q* ∝ p(x_s | x_t) · exp(psi_s(x_s)) the weight of a move depends on x_t alone: it is the mass that q* was
normalised by, known before the move. Counting it at x_t, as the log-twist there, lets resampling act on it one step
earlier, so that no particle is moved only to be dropped for where it came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import Generator, Tensor

from tokensteer.core.particles.path import Evaluation, Measure, Moved, Proposing, Resources, Step


@dataclass(frozen=True)
class Auxiliary:
    """A path with a locally optimal proposal (`Enumerated`, or `Optimal` for a product without a tilt) whose weights
    are counted before the move. The target and log Z are the same."""

    path: Proposing

    @property
    def steps(self) -> Sequence[Step]:
        return self.path.steps

    def start(self, rows: int, generator: Generator | None) -> Tensor:
        return self.path.start(rows, generator)

    @property
    def resources(self) -> Resources:
        return self.path.resources

    def evaluate(
        self,
        x: Tensor,
        t: float,
        generator: Generator | None,
        parent: Evaluation | None = None,
        weighed: bool = True,
    ) -> Evaluation:
        evaluation = self.path.evaluate(x, t, generator, parent, weighed)
        if t == 0:
            return evaluation
        step = next(step for step in self.steps if step.t == t)
        q = self.path.propose(x, evaluation, step)
        if q.log_mass is None:
            raise ValueError(
                "Auxiliary needs a proposal whose weight depends on x_t alone: Enumerated(), or Optimal() for a "
                "product without a tilt"
            )
        # The measure travels with its particles, so that it is not computed again after resampling.
        return replace(evaluation, log_twist=q.log_mass, proposed=q)

    def move(self, x: Tensor, evaluation: Evaluation, step: Step, generator: Generator | None) -> Moved:
        assert evaluation.proposed is not None, "particles are evaluated before they move"
        q = cast("Measure", evaluation.proposed)
        y = q.sample(generator)
        log_ratio = self.path.log_p(y, x, evaluation, step, q) - q.log_prob(y)
        return Moved(y, log_ratio, self.path.parent_of(evaluation))
