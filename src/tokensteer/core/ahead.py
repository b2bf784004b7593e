"""Resample before propagating, when the proposal is locally optimal.

With q* ∝ p(x_s | x_t) · exp(psi_s(x_s)) the weight of a move depends on x_t alone: it is the mass that q* was
normalised by, known before the move. Counting it at x_t, as the log-twist there, lets resampling act on it one step
earlier, so that no particle is moved only to be dropped for where it came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor

from tokensteer.core.gibbs import Proposing
from tokensteer.core.measure import Measure
from tokensteer.core.schedule import Step
from tokensteer.core.smc import Evaluation


@dataclass
class ResampleFirst:
    """A path with a locally optimal proposal (`Enumerated`, or `Optimal` for a product without a tilt) whose weights
    are counted before the move. The target and log Z are the same."""

    path: Proposing
    _ahead: dict[int, Measure] = field(default_factory=dict[int, Measure], init=False, repr=False)
    _looks: int = field(default=0, init=False, repr=False)

    @property
    def steps(self) -> Sequence[Step]:
        return self.path.steps

    def start(self, rows: int, generator: Generator | None) -> Tensor:
        return self.path.start(rows, generator)

    @property
    def populations(self) -> int:
        return self.path.populations

    def hand_down(self, evaluation: Evaluation) -> Evaluation:
        return self.path.hand_down(evaluation)

    def spent(self) -> Mapping[str, tuple[int, int]]:
        return self.path.spent()

    def limit(self, memory: int | None) -> None:
        self.path.limit(memory)

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
                "ResampleFirst needs a proposal whose weight depends on x_t alone: Enumerated(), or Optimal() for a "
                "product without a tilt"
            )
        # Each particle remembers which look and which row its measure is from, so that after resampling it is found and
        # not computed again, whatever other runs do in between.
        self._looks += 1
        self._ahead[self._looks] = q
        tag = (self._looks << 32) + torch.arange(len(x), device=x.device)
        return replace(evaluation, log_twist=q.log_mass, carry=tag)

    def move(self, x: Tensor, evaluation: Evaluation, step: Step, generator: Generator | None) -> tuple[Tensor, Tensor]:
        assert evaluation.carry is not None, "particles are evaluated before they move"
        look = int(evaluation.carry[0]) >> 32
        q = self._ahead.pop(look).take(evaluation.carry - (look << 32))
        y = q.sample(generator)
        return y, self.path.log_p(y, x, evaluation, step, q) - q.log_prob(y)
