"""Rejuvenation: between steps of SMC, particles redraw their recent past by an exact Markov move.

Resampling leaves copies. A move that leaves the target p(path) · exp(psi_t(x_t)) unchanged makes them differ again and
changes no weight (resample-move; Gilks and Berzuini, 2001). The move here is iterated sampling-importance resampling
(Tjelmeland, 2004; Andrieu, Lee and Vihola, 2018; docs/references.md): new segments are drawn from the particle's own
ancestor z by the path's proposal, and one of them or the present segment is chosen by the weight

    prod p/q over the segment · exp(psi_t at its end).

A segment is drawn with all its random parts, estimates of the reward and the memory of a kernel included, and keeps
them. Hence the move is exact for every kernel and twist whose log-twist depends on the particle alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Generator, Tensor

from tokensteer.core.numerics.domains import check_whole
from tokensteer.core.numerics.draws import inverse_cdf, uniforms
from tokensteer.core.particles.path import Evaluation, FeynmanKac, Moved, Step, Wrapper
from tokensteer.core.particles.resampling import weights


@dataclass(frozen=True)
class Segment:
    """The recent past of each particle: its ancestor's state (P, L) and evaluation, and log p - log q of the moves
    since, (P,). `weighed` has, for each state since, whether its weight was read."""

    x: Tensor
    evaluation: Evaluation
    log_ratio: Tensor
    weighed: tuple[bool, ...] = ()

    def take(self, rows: Tensor) -> Segment:
        return replace(self, x=self.x[rows], evaluation=self.evaluation.take(rows), log_ratio=self.log_ratio[rows])


@dataclass(frozen=True)
class Traced(Evaluation):
    """An evaluation with the particle's recent past, which resampling permutes like all else."""

    segment: Segment | None = None


def _traced(evaluation: Evaluation, segment: Segment | None) -> Traced:
    known = {f.name: getattr(evaluation, f.name) for f in fields(Evaluation)}
    return Traced(**known, segment=segment)


@dataclass(frozen=True)
class Rejuvenated(Wrapper[FeynmanKac]):
    """A path whose particles redraw their last `back` steps before every `every`-th step, by default every `back`-th.

    Each particle draws `tries` new segments, all in one batch, so a step costs 1 + tries · back / every times as many
    network rows. The target and log Z do not change. The predictions at the ancestors stay in memory for `back` steps.
    Records of a sweep hold the states before the move.
    """

    path: FeynmanKac
    back: int
    tries: int = 1
    every: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.path, Rejuvenated):
            raise TypeError("Rejuvenated wraps a Steering, got a Rejuvenated: give it more `tries` instead")
        check_whole("Rejuvenated.back", self.back)
        check_whole("Rejuvenated.tries", self.tries)
        if self.every is not None:
            check_whole("Rejuvenated.every", self.every, self.back, "segments of `back` steps must not overlap")
        if self.back >= len(self.path.steps):
            raise ValueError(
                f"Rejuvenated.back is {self.back} and the path has {len(self.path.steps)} steps: nothing would be "
                "redrawn before the last of them. Use a smaller `back`"
            )

    def evaluate(
        self, x: Tensor, t: float, generator: Generator | None, parent: Evaluation | None = None, weighed: bool = True
    ) -> Evaluation:
        segment = parent.segment if isinstance(parent, Traced) else None
        if segment is not None:  # the weights of segments are read where these end
            weighed = weighed or len(segment.weighed) + 1 == self.back
            segment = replace(segment, weighed=(*segment.weighed, weighed))
        evaluation = self.path.evaluate(x, t, generator, parent, weighed)
        if evaluation.ramp is not None and t > 0:
            raise ValueError(
                "Rejuvenated cannot move particles under an Adaptive ramp, whose lambda depends on the whole "
                "population: freeze it by adapted_ramp(steering, ...), or use a ramp that is a function of t"
            )
        return _traced(evaluation, segment)

    def move(self, x: Tensor, evaluation: Evaluation, step: Step, generator: Generator | None) -> Moved:
        segment = evaluation.segment if isinstance(evaluation, Traced) else None
        log_twist, evaluation = evaluation.log_twist, _traced(evaluation, None)
        if segment is not None and len(segment.weighed) == self.back:
            x, evaluation = self._redraw(x, evaluation, segment, step, generator)
            segment = None
        if self._begins(step.index):
            segment = Segment(x, evaluation, torch.zeros_like(x[:, 0], dtype=torch.float64))
        moved = self.path.move(x, evaluation, step, generator)
        if segment is not None:
            segment = replace(segment, log_ratio=segment.log_ratio + moved.log_ratio)
        # The weight does not change by the redraw, and the loop subtracts the log-twist of the state before it.
        change = log_twist - evaluation.log_twist
        return Moved(moved.x, moved.log_ratio + change, _traced(moved.parent, segment))

    def _begins(self, index: int) -> bool:
        """Whether a segment that will be redrawn begins before this step."""
        end = index + self.back
        return end < len(self.steps) and end % (self.every or self.back) == 0

    def _redraw(
        self, x: Tensor, evaluation: Evaluation, segment: Segment, step: Step, generator: Generator | None
    ) -> tuple[Tensor, Evaluation]:
        """The states before `step` and their evaluations, after the move."""
        rows, tries = torch.arange(len(x), device=x.device), self.tries
        new = segment.take(rows.repeat_interleave(tries))
        y, known, log_ratio = new.x, new.evaluation, new.log_ratio.new_zeros(len(new.x))
        # Weights are read where they were for the present segment, so that estimates are drawn in the same way.
        for earlier, weighed in zip(self.steps[step.index - self.back : step.index], segment.weighed, strict=True):
            moved = self.path.move(y, known, earlier, generator)
            y, log_ratio = moved.x, log_ratio + moved.log_ratio
            known = self.path.evaluate(y, earlier.s, generator, moved.parent, weighed)
        own, others = segment.log_ratio + evaluation.log_twist, log_ratio + known.log_twist
        log_w = torch.cat([own.view(-1, 1), others.view(-1, tries)], 1)
        if (log_w.isnan() | (log_w == math.inf)).any():
            raise FloatingPointError(
                f"the weight of a segment that ends at t = {step.t:.4g} is NaN or +inf: the denoiser or the reward "
                "gave NaN, or the proposal has no mass at a state it drew"
            )
        chosen = inverse_cdf(weights(log_w), uniforms((len(x), 1), log_w, generator)).squeeze(-1)
        chosen = torch.where(log_w.amax(-1) == -math.inf, 0, chosen)  # a dead particle stays where it is
        kept, left = (chosen == 0).nonzero().squeeze(-1), (chosen > 0).nonzero().squeeze(-1)
        taken = left * tries + chosen[left] - 1
        order = torch.empty_like(rows).index_copy(0, torch.cat([kept, left]), rows)
        joined = evaluation.take(kept).join(_traced(known.take(taken), None))
        return torch.cat([x[kept], y[taken]])[order], joined.take(order)
