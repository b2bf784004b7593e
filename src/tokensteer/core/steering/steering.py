"""Steering: a model, a twist and a proposal as a Feynman-Kac path.

`evaluate` is the only caller of the base denoiser: once per step, never at t = 0. The prediction, the estimate of the
reward and its gradient come out of one forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor

from tokensteer.core.kernels.measure import ModelAware, Relative, Reveal, draw
from tokensteer.core.models.diffusion import Diffusion, Model, clock
from tokensteer.core.models.prediction import stored_prediction
from tokensteer.core.numerics.capture import capturing
from tokensteer.core.particles.path import Evaluation, Measure, Moved, Resources, Step
from tokensteer.core.proposals.proposal import FromModel, Proposal, predicts_late
from tokensteer.core.steering.estimate_cache import EstimateCache
from tokensteer.core.steering.probe import probe
from tokensteer.core.twists.estimators import NoisyState
from tokensteer.core.twists.tilt import Tilt


@dataclass(frozen=True)
class Steering:
    """What `smc` runs: the target model(x_0) · exp(r(x_0)/kl), with particles moved by `proposal`.

    Construction runs two steps of all parts, so that a misfit raises at once.
    """

    model: Model
    twist: Tilt | None = None
    proposal: Proposal = field(default_factory=FromModel)
    _cache: EstimateCache = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.twist is not None and not isinstance(self.twist, Tilt):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"the twist must be a Tilt, got {type(self.twist).__name__}: wrap a reward as Tilt(reward)")
        if not isinstance(self.proposal, Proposal):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"the proposal must be an object with needs_gradient and meters, got {type(self.proposal).__name__}: "
                "see Proposal, or start from FromModel()"
            )
        if self.twist is not None and self.twist.populations not in (1, self.model.populations):
            raise ValueError(
                f"the reward has contexts of {self.twist.populations} rows and the model is of "
                f"{self.model.populations} population(s): give the reward one row, or the model as many contexts or "
                "templates"
            )
        object.__setattr__(self, "_cache", EstimateCache.of(self.model, self.twist, self.proposal))
        probe(self)

    @property
    def steps(self) -> Sequence[Step]:
        return self.model.steps

    @property
    def resources(self) -> Resources:
        own = () if self._cache.proposer is None else (self._cache.proposer,)
        twist = () if self.twist is None else (self.twist,)
        meters = {
            "denoiser": [model.meter for model in self.model.networks],
            "reward": [tilt.meter for tilt in twist],
            "proposal": [*(model.meter for model in own), *self.proposal.meters],
        }
        budgets = [network.chunks for network in (*self.model.networks, *own, *twist)]
        return Resources(self.model.populations, meters, budgets)

    def start(self, rows: int, generator: Generator | None) -> Tensor:
        return self.model.start(rows, generator)

    @torch.no_grad()
    def evaluate(
        self,
        x: Tensor,
        t: float,
        generator: Generator | None,
        parent: Evaluation | None = None,
        weighed: bool = True,
    ) -> Evaluation:
        if t == 0:
            return self._final(x)
        if parent is not None and self._predicts_late(t):
            return Evaluation(_zeros(x))
        memory = self._cache.memory(x, generator, parent)
        time = clock(self.model, memory, t)
        prediction, gradient, fresh = self._cache.predict(x, t, time, generator, parent)
        of = None if self.twist is None else self.twist.located(x)
        state = NoisyState(x, self.model.clean(prediction), t, self.model.kernel.mask_id, of=of)
        reward = self._cache.reward(state, fresh, generator, parent, weighed)
        log_lookahead = self._cache.lookahead(state, prediction, parent, weighed)
        proposed = self._cache.proposed(x, time, parent)
        known = Evaluation(_zeros(x), prediction, reward, gradient, proposed, None, memory, log_lookahead)
        if self.twist is None:
            return known if log_lookahead is None else replace(known, log_twist=log_lookahead)
        return self.twist.weigh(known, t, parent, weighed)

    def _predicts_late(self, t: float) -> bool:
        """Whether nothing reads a prediction at x_t. The start is predicted all the same: no site is masked again, so
        that the move can use it."""
        if self.twist is not None or self.model.looks_ahead:
            return False
        return predicts_late(self.proposal, self.model, next(step for step in self.steps if step.t == t))

    def _final(self, x: Tensor) -> Evaluation:
        """The end: the reward itself, whatever the potential before it."""
        if not capturing() and (x == self.model.kernel.mask_id).any():
            raise ValueError("masked sites are left at t = 0: let the kernel open all sites by its last step")
        if self.twist is None:
            return Evaluation(_zeros(x))
        reward = self.twist.exact(x)
        return Evaluation(self.twist.scale(0.0) * reward, reward=reward, ramp=self.twist.adapt(0.0, reward, None))

    @torch.no_grad()
    def propose(self, x: Tensor, evaluation: Evaluation, step: Step) -> Measure:
        """q(· | x_t)."""
        return self.proposal(x, evaluation, step, self.model, self.twist)

    @torch.no_grad()
    def log_p(self, y: Tensor, x: Tensor, evaluation: Evaluation, step: Step, q: Measure) -> Tensor:
        """log p(y | x_t) over the sites that q shares, (P,)."""
        known = q.log_model(y) if isinstance(q, ModelAware) else None
        return self.model.log_prob(y, x, stored_prediction(evaluation), step, q.sites) if known is None else known

    def log_ratio(
        self, y: Tensor, x: Tensor, evaluation: Evaluation, step: Step, q: Measure, log_q: Tensor | None = None
    ) -> Tensor:
        """log p(y | x_t) - log q(y | x_t), (P,). Give log_q where y was drawn from q: p and q then share terms."""
        if log_q is not None and isinstance(self.proposal, FromModel) and isinstance(self.model, Diffusion):
            return log_q - log_q  # p is q: 0, or NaN where the denoiser returned one
        if isinstance(q, Relative) and isinstance(self.model, Diffusion) and not (log_q is None and q.of_draws):
            p = self.model.transition(x, stored_prediction(evaluation), step, q.sites)
            log_over = q.log_over(p, y) if isinstance(p, Reveal) else None
            if log_over is not None:
                return -log_over
        return self.log_p(y, x, evaluation, step, q) - (q.log_prob(y) if log_q is None else log_q)

    def move(self, x: Tensor, evaluation: Evaluation, step: Step, generator: Generator | None) -> Moved:
        q = self.propose(x, evaluation, step)
        y, log_q = draw(q, generator)
        return Moved(y, self.log_ratio(y, x, evaluation, step, q, log_q), self.parent_of(evaluation))

    def parent_of(self, evaluation: Evaluation) -> Evaluation:
        return self._cache.for_children(evaluation)


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x[:, 0], dtype=torch.float64)
