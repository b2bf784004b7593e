"""Steering: a model, a twist and a proposal as a Feynman-Kac path.

`evaluate` is the only caller of the base denoiser: once per step, never at t = 0. The prediction, the estimate of the
reward and its gradient come out of that one forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor

from tokensteer.core.kernels.kernel import Stateful
from tokensteer.core.kernels.measure import Reveal, SiteMeasure, Table, draw
from tokensteer.core.models.denoiser import Time, Timeless
from tokensteer.core.models.diffusion import Diffusion, Model, clock
from tokensteer.core.models.prediction import Prediction, changed
from tokensteer.core.models.validation import halfway, unwritten
from tokensteer.core.numerics.capture import capturing
from tokensteer.core.particles.path import Evaluation, Measure, Moved, Resources, Rows, Step
from tokensteer.core.proposals.amortised import Amortised
from tokensteer.core.proposals.gradient import Gradient
from tokensteer.core.proposals.proposal import FromModel, Proposal, inmost
from tokensteer.core.twists.estimators import NoisyState
from tokensteer.core.twists.gradient import Fresh, predict_with_gradient
from tokensteer.core.twists.potentials import difference
from tokensteer.core.twists.tilt import Tilt


@dataclass(frozen=True)
class Steering:
    """What `smc` runs: the target model(x_0) · exp(r(x_0)/kl), with particles moved by `proposal`.

    The model's start goes through all parts at construction, so that what cannot work is said at once.
    """

    model: Model
    twist: Tilt | None = None
    proposal: Proposal = field(default_factory=FromModel)
    _own: Diffusion | None = field(default=None, init=False, repr=False, compare=False)
    _followed: Tilt | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.twist is not None and not isinstance(self.twist, Tilt):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"the twist must be a Tilt, got {type(self.twist).__name__}: wrap a reward as Tilt(reward)")
        if not hasattr(self.proposal, "needs_gradient"):
            raise TypeError(
                f"the proposal must be an object with needs_gradient and meters, got {type(self.proposal).__name__}: "
                "see Proposal, or start from FromModel()"
            )
        if self.proposal.needs_gradient and self.twist is None:
            raise ValueError("the proposal follows a gradient and there is no reward to follow: give Steering a Tilt")
        own = inmost(self.proposal, Amortised)
        if own is not None:  # it is asked as the model is: about distinct states, and about those that are new
            object.__setattr__(self, "_own", replace(self.model.base, denoiser=own.denoiser))
        object.__setattr__(self, "_followed", self._to_follow())
        self._probe()

    def _to_follow(self) -> Tilt | None:
        """The tilt whose gradient is taken: that of the target, perhaps with draws of its own."""
        gradient = inmost(self.proposal, Gradient)
        draws = None if gradient is None else gradient.draws
        if self.twist is None or draws is None:
            return self.twist
        if not self.twist.drawn:
            raise ValueError(
                f"Gradient.draws counts clean sequences, and {type(self.twist.estimator).__name__} draws none: leave "
                "it out, or use Sampled()"
            )
        return self.twist if draws == self.twist.draws else self.twist.with_draws(draws)

    def _probe(self) -> None:
        """Two steps, from the start and half-way: shapes fit, and q gives mass wherever p does."""
        generator = torch.Generator(device=self.model.device).manual_seed(0)
        x = self.model.start(self.model.populations, generator)
        evaluation = self._probe_step(x, self.steps[0], generator)
        open_half = halfway(x, self.model.kernel.mask_id, self.model.clean(_known(evaluation)).likeliest)
        self._probe_step(open_half, self.steps[len(self.steps) // 2], generator)
        if self.twist is not None:
            # Two rows, so that a reward that sums over the batch is told from one that does not.
            mask_id = self.model.kernel.mask_id
            clean = x[:1].masked_fill(x[:1] == mask_id, 1 if mask_id == 0 else 0).repeat(2, 1)
            unwritten("the reward", self.twist.exact, clean)

    def _probe_step(self, x: Tensor, step: Step, generator: Generator) -> Evaluation:
        evaluation = self.evaluate(x, step.t, generator)
        q = self.propose(x, evaluation, step)
        p = self.model.transition(x, _known(evaluation), step, q.sites)
        if isinstance(q, SiteMeasure) and not q.covers(p):
            raise ValueError(
                "the proposal gives no mass to states that the model can reach, so weights would miss them: give its "
                "network full support (no top-k, nucleus or -inf logits that the model does not have)"
            )
        if isinstance(q, Reveal | Table) and not (q.total().abs() < 1e-3).all():
            raise ValueError("the proposal does not sum to one: return measure.normalise(), or what tilt() gives")
        return evaluation

    @property
    def steps(self) -> Sequence[Step]:
        return self.model.steps

    @property
    def resources(self) -> Resources:
        own = () if self._own is None else (self._own,)
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

    def evaluate(
        self,
        x: Tensor,
        t: float,
        generator: Generator | None,
        parent: Evaluation | None = None,
        weighed: bool = True,
    ) -> Evaluation:
        if t == 0:
            return self._judge(x)
        with torch.no_grad():
            memory = self._remember(x, generator, parent)
            time = clock(self.model, memory, t)
            fresh = None
            if self._differentiates(t, parent):
                prediction, gradient, fresh = self._follow(x, t, time, generator, parent)
            else:
                prediction = self.model.predict(x, time, _prediction(parent))
                gradient = None if parent is None else parent.gradient
            look = NoisyState(x, self.model.clean(prediction), t, self.model.kernel.mask_id)
            reward = self._estimated(look, fresh, generator, parent, weighed)
            known = Evaluation(torch.zeros_like(x[:, 0], dtype=torch.float64), prediction, reward, gradient)
            known = replace(known, log_lookahead=self._chance(x, known, t, parent, weighed))
            known = self._weigh(known, t, parent, weighed)
            return replace(known, memory=memory, proposed=self._propose_tokens(x, time, parent))

    def _propose_tokens(self, x: Tensor, time: Time, parent: Evaluation | None) -> Prediction | None:
        """What the proposal's own network says, if it has one."""
        before = None if parent is None or not isinstance(parent.proposed, Prediction) else parent.proposed
        return None if self._own is None else self._own.predict(x, time, before)

    def _differentiates(self, t: float, parent: Evaluation | None) -> bool:
        """Whether the gradient is taken here, or that of the parent followed if there is any need of one."""
        if self._pace == 1 or parent is None or parent.gradient is None:
            return self.proposal.needs_gradient
        return next(step.index for step in self.steps if step.t == t) % self._pace == 0

    @property
    def _pace(self) -> int:
        """A gradient is taken at each so many steps."""
        gradient = inmost(self.proposal, Gradient)
        return 1 if gradient is None else gradient.every

    def _estimated(
        self,
        look: NoisyState,
        fresh: Fresh | None,
        generator: Generator | None,
        parent: Evaluation | None,
        weighed: bool,
    ) -> Tensor | None:
        """The estimate of the reward, (P,): those just made, those of the parent that still hold, and new ones for the
        rest. None where nobody will look, unless it is there at every step: all being known by chance does not count,
        since a population must not depend on whether others have moved."""
        everywhere = fresh is not None and self._pace == 1
        if self.twist is None or (self.twist.rests(look.t, parent, weighed) and not everywhere):
            return None
        if fresh is not None and len(fresh.rows) == len(look.x):
            return fresh.estimates
        keeps = self._keeps(parent)
        if fresh is None and keeps is None:
            return self.twist.estimate(look, generator)
        missing = changed(look.x, _prediction(keeps))
        if fresh is not None:
            missing = missing[~torch.isin(missing, fresh.rows)]
        if len(missing) == len(look.x):
            return self.twist.estimate(look, generator)
        reward = None if keeps is None else keeps.reward
        if fresh is not None:
            reward = _renewed(fresh.estimates.new_zeros(len(look.x)) if reward is None else reward, *fresh)
        assert reward is not None, "what is not missing was kept or just made"
        if len(missing):
            reward = _renewed(reward, missing, self.twist.estimate(look.take(missing), generator))
        held = len(reward) - len(missing) - (0 if fresh is None else len(fresh.rows))
        self.twist.meter.count(0, held * (self.twist.draws if self.twist.drawn else 1))
        return reward

    def _keeps(self, parent: Evaluation | None) -> Evaluation | None:
        """The parent, if what was estimated of it holds for a child in the same state."""
        return parent if parent is not None and parent.reward is not None and self._timeless and self._lasting else None

    @property
    def _timeless(self) -> bool:
        """Whether networks and estimates say the same of a state at any time."""
        estimator = None if self.twist is None else self.twist.estimator
        return isinstance(estimator, Timeless) and estimator.ignores_time and self.model.ignores_time

    @property
    def _lasting(self) -> bool:
        """Whether an estimate may be used again. A potential that gathers them wants them with fresh noise: the same
        noise, gathered again and again, would not average out."""
        assert self.twist is not None
        return self.twist.potential is difference or not self.twist.estimator.random

    def _follow(
        self, x: Tensor, t: float, time: Time, generator: Generator | None, parent: Evaluation | None
    ) -> tuple[Prediction, Prediction, Fresh | None]:
        """The prediction, the gradient, and the estimates that came with it, if it is theirs."""
        twist, own = self._followed, self._followed is not self.twist
        assert twist is not None, "only a reward is followed"
        before = slopes = None
        if parent is not None and self._timeless and (own or self._lasting):
            before, slopes = _prediction(parent), _rows(parent.gradient)
        prediction, gradient, fresh = predict_with_gradient(self.model, twist, x, t, time, generator, before, slopes)
        return prediction, gradient, None if own else fresh

    def _chance(
        self, x: Tensor, known: Evaluation, t: float, parent: Evaluation | None, weighed: bool
    ) -> Tensor | None:
        """The term of the log-twist that counts in full. Where nobody looks, that of the parent will do."""
        if self.twist is None or self.twist.log_lookahead is None:
            return None
        if parent is not None and not weighed:
            return parent.log_lookahead
        look = NoisyState(x, self.model.clean(_known(known)), t, self.model.kernel.mask_id)
        return self.twist.lookahead(look)

    def _weigh(self, known: Evaluation, t: float, parent: Evaluation | None, weighed: bool) -> Evaluation:
        """What is known with its log-twist. Where no estimate is wanted, that of the parent will do: they telescope. An
        estimate that is known all the same is for later: whether there is one depends on who else has moved."""
        if self.twist is None:
            return known
        log_lookahead = 0.0 if known.log_lookahead is None else known.log_lookahead
        if parent is not None and parent.log_lookahead is not None:  # potentials build on what the ramp has let in
            parent = replace(parent, log_twist=parent.log_twist - parent.log_lookahead)
        if known.reward is None or self.twist.rests(t, parent, weighed):
            ramp = None if parent is None else parent.ramp
            log_twist, carry = self.twist.rest(known.log_twist, t, parent)
        else:
            ramp = self.twist.adapt(t, known.reward, parent, log_lookahead)
            log_twist, carry = self.twist.potential(self.twist.scale(t, ramp), known.reward, parent)
        return replace(known, log_twist=log_twist + log_lookahead, carry=carry, ramp=ramp, pending=None)

    def _remember(self, x: Tensor, generator: Generator | None, parent: Evaluation | None) -> Tensor | None:
        """What the kernel wants kept of this state, if it has a memory."""
        kernel = self.model.kernel
        if not isinstance(kernel, Stateful):
            return None
        before = _prediction(parent)
        if parent is None or before is None or not before.stores:
            return kernel.remember(x, None, None, generator)
        return kernel.remember(x, parent.memory, self.model.clean(before), generator)

    def _judge(self, x: Tensor) -> Evaluation:
        """The end: the reward itself, whatever the potentials before it."""
        if not capturing() and (x == self.model.kernel.mask_id).any():
            raise ValueError("masked sites are left at t = 0: let the kernel open all sites by its last step")
        if self.twist is None:
            return Evaluation(torch.zeros_like(x[:, 0], dtype=torch.float64))
        with torch.no_grad():
            reward = self.twist.exact(x)
        return Evaluation(self.twist.scale(0.0) * reward, reward=reward, ramp=self.twist.adapt(0.0, reward, None))

    @torch.no_grad()
    def propose(self, x: Tensor, evaluation: Evaluation, step: Step) -> Measure:
        """q(· | x_t)."""
        return self.proposal(x, evaluation, step, self.model, self.twist)

    @torch.no_grad()
    def log_p(self, y: Tensor, x: Tensor, evaluation: Evaluation, step: Step, q: Measure) -> Tensor:
        """log p(y | x_t) over the sites that q shares, (P,)."""
        return self.model.log_prob(y, x, _known(evaluation), step, q.sites)

    def log_ratio(
        self, y: Tensor, x: Tensor, evaluation: Evaluation, step: Step, q: Measure, log_q: Tensor | None = None
    ) -> Tensor:
        """log p(y | x_t) - log q(y | x_t), (P,); log_q is given where y was just drawn from q."""
        if log_q is None:  # whoever asks about any y wants p for itself, not the word of a proposal that it is p
            return self.log_p(y, x, evaluation, step, q) - q.log_prob(y)
        if isinstance(self.proposal, FromModel) and isinstance(self.model, Diffusion):
            return log_q - log_q  # p is q: 0, or NaN where the denoiser gave one
        if isinstance(q, Reveal) and isinstance(self.model, Diffusion):
            p = self.model.transition(x, _known(evaluation), step, q.sites)
            log_over = q.log_over(p, y) if isinstance(p, Reveal) else None
            if log_over is not None:
                return -log_over
        return self.log_p(y, x, evaluation, step, q) - log_q

    def move(self, x: Tensor, evaluation: Evaluation, step: Step, generator: Generator | None) -> Moved:
        q = self.propose(x, evaluation, step)
        y, log_q = draw(q, generator)
        return Moved(y, self.log_ratio(y, x, evaluation, step, q, log_q), self.parent_of(evaluation))

    def parent_of(self, evaluation: Evaluation) -> Evaluation:
        """Without what networks said, where they are asked anew whatever they said, or where it would not fit in beside
        what they say next: it may be large."""
        remembers, follows = evaluation.memory is not None, self.proposal.needs_gradient
        said = evaluation.prediction if remembers else _handed(evaluation.prediction, self.model, whole=follows)
        return replace(
            evaluation,
            prediction=said,
            gradient=evaluation.gradient if self._timeless or self._pace > 1 else None,
            proposed=None if self._own is None else _handed(evaluation.proposed, self._own),
        )


def _rows(known: Rows | None) -> Prediction | None:
    return known if isinstance(known, Prediction) else None


def _handed(known: Rows | None, model: Model, whole: bool = False) -> Prediction | None:
    """Of what a model said, what it need not be asked again: all where that is needed `whole` or there is room for it,
    else who stood where, for estimates that still hold."""
    prediction = _rows(known) if model.ignores_time else None
    if prediction is None or whole or model.base.chunks.holds(prediction.nbytes):
        return prediction
    return replace(prediction, stores=())


def _prediction(evaluation: Evaluation | None) -> Prediction | None:
    return None if evaluation is None else _rows(evaluation.prediction)


def _known(evaluation: Evaluation) -> Prediction:
    prediction = _prediction(evaluation)
    assert prediction is not None, "particles are evaluated before they move"
    return prediction


def _renewed(values: Tensor, new: Tensor, fresh: Tensor) -> Tensor:
    """values (P,) with fresh ones for the particles `new`."""
    return values.index_copy(0, new, fresh.to(values.dtype))
