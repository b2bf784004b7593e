"""The auxiliary particle filter: resample before moving (Pitt and Shephard, 1999; docs/references.md).

With the locally optimal proposal q* ∝ p(x_s | x_t) · exp(psi_s(x_s)), the weight of a move is the normaliser of q*,
which depends on x_t alone. As the log-twist at x_t it is known to resampling one step earlier.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from torch import Generator, Tensor

from tokensteer.core.particles.path import Evaluation, Measure, Moved, Proposing, Step, Wrapper


@dataclass(frozen=True)
class Auxiliary(Wrapper[Proposing]):
    """A path with a locally optimal proposal (`Enumerated`, or `Optimal` for a product without a tilt), weighted before
    each move. The target and log Z do not change."""

    path: Proposing

    def evaluate(
        self, x: Tensor, t: float, generator: Generator | None, parent: Evaluation | None = None, weighed: bool = True
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
        # The measure is stored with its particles, so it is not computed again after resampling.
        return replace(evaluation, log_twist=q.log_mass, proposed=q)

    def move(self, x: Tensor, evaluation: Evaluation, step: Step, generator: Generator | None) -> Moved:
        assert evaluation.proposed is not None, "particles are evaluated before they move"
        q = cast("Measure", evaluation.proposed)
        y = q.sample(generator)
        log_ratio = self.path.log_p(y, x, evaluation, step, q) - q.log_prob(y)
        return Moved(y, log_ratio, self.path.parent_of(evaluation))
