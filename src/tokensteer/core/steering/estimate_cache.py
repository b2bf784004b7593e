"""Predictions, estimates and gradients along a path: what a step computes, and what it keeps from the step before.

A prediction holds for a child in the same state if no network depends on time. An estimate holds if it does not depend
on time either and the potential allows reuse (`Tilt.reusable`). All else is computed anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from tokensteer.core.kernels.kernel import Stateful
from tokensteer.core.models.denoiser import Time, Timeless
from tokensteer.core.models.diffusion import Diffusion, Model
from tokensteer.core.models.prediction import Prediction, as_prediction, changed
from tokensteer.core.particles.path import Evaluation, Rows
from tokensteer.core.proposals.amortised import Amortised
from tokensteer.core.proposals.gradient import Gradient
from tokensteer.core.proposals.proposal import Proposal, of_kind
from tokensteer.core.twists.estimators import NoisyState
from tokensteer.core.twists.gradient import Fresh, predict_with_gradient
from tokensteer.core.twists.tilt import Tilt


@dataclass(frozen=True)
class EstimateCache:
    """Computes what an evaluation needs and the parent's evaluation does not hold.

    `proposer` is the proposal's own network, called as the model is. `differentiated` is the tilt whose gradient is
    taken, that of the target or one with another number of draws; `every` so many steps.
    """

    model: Model
    twist: Tilt | None
    proposer: Diffusion | None
    differentiated: Tilt | None
    every: int

    @classmethod
    def of(cls, model: Model, twist: Tilt | None, proposal: Proposal) -> EstimateCache:
        if proposal.needs_gradient and twist is None:
            raise ValueError("the proposal follows a gradient and there is no reward to follow: give Steering a Tilt")
        networks = {id(amortised.denoiser): amortised.denoiser for amortised in of_kind(proposal, Amortised)}
        gradients = {(gradient.every, gradient.draws) for gradient in of_kind(proposal, Gradient)}
        if len(networks) > 1 or len(gradients) > 1:
            raise ValueError(
                "the parts of a proposal share one network of their own and one gradient: give each Amortised the same "
                "denoiser, and each Gradient the same `every` and `draws`"
            )
        proposer = replace(model.base, denoiser=next(iter(networks.values()))) if networks else None
        every, draws = next(iter(gradients)) if gradients else (1, None)
        differentiated = twist if proposal.needs_gradient else None
        if differentiated is not None and draws is not None:
            if not differentiated.drawn:
                name = type(differentiated.estimator).__name__
                raise ValueError(
                    f"Gradient.draws counts clean sequences, and {name} draws none: leave it out, or use Sampled()"
                )
            if draws != differentiated.draws:
                differentiated = differentiated.with_draws(draws)
        return cls(model, twist, proposer, differentiated, every)

    @property
    def timeless(self) -> bool:
        """Whether predictions and estimates depend on the state alone, not on time."""
        estimator = None if self.twist is None else self.twist.estimator
        return isinstance(estimator, Timeless) and estimator.ignores_time and self.model.ignores_time

    def memory(self, x: Tensor, generator: Generator | None, parent: Evaluation | None) -> Tensor | None:
        """The state of a stateful kernel, (P, ...)."""
        kernel = self.model.kernel
        if not isinstance(kernel, Stateful):
            return None
        before = _prediction(parent)
        if parent is None or before is None or not before.stores:
            return kernel.remember(x, None, None, generator)
        return kernel.remember(x, parent.memory, self.model.clean(before), generator)

    def predict(
        self, x: Tensor, t: float, time: Time, generator: Generator | None, parent: Evaluation | None
    ) -> tuple[Prediction, Rows | None, Fresh | None]:
        """The prediction, the gradient of the estimate if the proposal needs one, and the estimates made on the way."""
        if not self._differentiates(t, parent):
            gradient = None if parent is None else parent.gradient
            return self.model.predict(x, time, _prediction(parent)), gradient, None
        assert self.differentiated is not None, "a gradient needs a tilt"
        apart = self.differentiated is not self.twist
        before = gradient = None
        if parent is not None and self.timeless and (apart or self.differentiated.reusable):
            before, gradient = _prediction(parent), as_prediction(parent.gradient)
        found, gradient, fresh = predict_with_gradient(
            self.model, self.differentiated, x, t, time, generator, before, gradient
        )
        return found, gradient, None if apart else fresh

    def _differentiates(self, t: float, parent: Evaluation | None) -> bool:
        """Whether a gradient is taken at time t, and not that of the parent kept."""
        if self.every == 1 or parent is None or parent.gradient is None:
            return self.differentiated is not None
        return next(step.index for step in self.model.steps if step.t == t) % self.every == 0

    def proposed(self, x: Tensor, time: Time, parent: Evaluation | None) -> Prediction | None:
        """The prediction of the proposal's own network."""
        before = None if parent is None else as_prediction(parent.proposed)
        return None if self.proposer is None else self.proposer.predict(x, time, before)

    def reward(
        self,
        state: NoisyState,
        fresh: Fresh | None,
        generator: Generator | None,
        parent: Evaluation | None,
        weighed: bool,
    ) -> Tensor | None:
        """The estimate of the reward, (P,): those in `fresh`, the parent's that still hold, and new ones for the rest.
        New ones are averaged with the parent's if the tilt smooths.

        None where the tilt rests, unless a gradient pass makes estimates at every step. None even if every estimate is
        cached: populations must stay independent.
        """
        twist, everywhere = self.twist, fresh is not None and self.every == 1
        if twist is None or (twist.rests(state.t, parent, weighed) and not everywhere):
            return None
        before = None if parent is None else parent.reward
        if fresh is not None and len(fresh.rows) == len(state.x):
            return twist.smoothed(fresh.estimates, before)
        holds = parent is not None and before is not None and self.timeless and twist.reusable
        kept = before if holds else None
        if fresh is None and kept is None:
            return twist.smoothed(twist.estimate(state, generator), before)
        missing = changed(state.x, _prediction(parent) if holds else None)
        if fresh is not None:
            missing = missing[~torch.isin(missing, fresh.rows)]
        if len(missing) == len(state.x):
            return twist.smoothed(twist.estimate(state, generator), before)
        reward = torch.zeros(len(state.x), dtype=torch.float64, device=state.x.device) if kept is None else kept

        def put(rows: Tensor, estimates: Tensor) -> Tensor:
            return reward.index_copy(0, rows, twist.smoothed(estimates, None if before is None else before[rows]))

        if fresh is not None:
            reward = put(*fresh)
        if len(missing):
            reward = put(missing, twist.estimate(state.take(missing), generator))
        saved = len(reward) - len(missing) - (0 if fresh is None else len(fresh.rows))
        twist.meter.count(0, saved * (twist.draws if twist.drawn else 1))
        return reward

    def lookahead(
        self, state: NoisyState, prediction: Prediction, parent: Evaluation | None, weighed: bool
    ) -> Tensor | None:
        """The term of the log-twist that no ramp scales, of the model and of the tilt. Where no weight is read, that of
        the parent is kept."""
        if parent is not None and not weighed:
            return parent.log_lookahead
        of_model = self.model.log_lookahead(prediction) if self.model.looks_ahead else None
        if self.twist is None or self.twist.log_lookahead is None:
            return of_model
        of_tilt = self.twist.lookahead(state)
        return of_tilt if of_model is None else of_model + of_tilt

    def for_children(self, evaluation: Evaluation) -> Evaluation:
        """What the evaluation of the children can use. Predictions are dropped where networks depend on time, or where
        two of them would not fit in memory."""
        prediction: Rows | None = evaluation.prediction
        if evaluation.memory is None:
            prediction = _kept(prediction, self.model, whole=self.differentiated is not None)
        return replace(
            evaluation,
            prediction=prediction,
            gradient=evaluation.gradient if self.timeless or self.every > 1 else None,
            proposed=None if self.proposer is None else _kept(evaluation.proposed, self.proposer),
        )


def _prediction(evaluation: Evaluation | None) -> Prediction | None:
    return None if evaluation is None else as_prediction(evaluation.prediction)


def _kept(rows: Rows | None, model: Model, whole: bool = False) -> Prediction | None:
    """A prediction that holds at any time: all of it if needed `whole` or if it fits in memory; else its states, which
    tell whose estimates still hold."""
    prediction = as_prediction(rows) if model.ignores_time else None
    if prediction is None or whole or model.base.chunks.holds(prediction.nbytes):
        return prediction
    return replace(prediction, stores=())
