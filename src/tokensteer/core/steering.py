"""Steering: a model, a twist and a proposal as a Feynman-Kac path, and every named method as one row of a table.

`evaluate` is the only caller of the base denoiser: once per step, never at t = 0. The prediction, the estimate of the
reward and its gradient come out of that one forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from tokensteer.core.kernel import Remembering
from tokensteer.core.measure import Measure, Reveal, SiteMeasure, Table
from tokensteer.core.model import Diffusion, Model, check_denoiser, clock, halfway
from tokensteer.core.product import Product, guided
from tokensteer.core.proposal import Amortised, FromModel, Gradient, Guided, Optimal, Proposal
from tokensteer.core.resample import (
    Resampler,
    Trigger,
    always,
    ess_below,
    every,
    multinomial,
    nested,
    never,
    one_survivor,
    systematic,
)
from tokensteer.core.schedule import Step, end_ramp
from tokensteer.core.smc import Evaluation, Result, smc
from tokensteer.core.twist import Look, Potential, Tilt, difference


@dataclass(frozen=True)
class Steering:
    """What `smc` runs: the target model(x_0) · exp(r(x_0)/kl), with particles moved by `proposal`.

    The model's start goes through all parts at construction, so that what cannot work is said at once.
    """

    model: Model
    twist: Tilt | None = None
    proposal: Proposal = field(default_factory=FromModel)

    def __post_init__(self) -> None:
        if self.proposal.needs_gradient and self.twist is None:
            raise ValueError("the proposal follows a gradient and there is no reward to follow: give Steering a Tilt")
        if isinstance(self.proposal, Amortised):
            check_denoiser(self.proposal.denoiser, self.model.base)
        self._probe()

    def _probe(self) -> None:
        """Two steps, from the start and half-way: shapes fit, and q gives mass wherever p does."""
        generator = torch.Generator(device=self.model.device).manual_seed(0)
        x = self.model.start(self.model.populations, generator)
        evaluation = self._probe_step(x, self.steps[0], generator)
        open_half = halfway(x, self.model.clean(_known(evaluation.prediction)), self.model.kernel.mask_id)
        self._probe_step(open_half, self.steps[len(self.steps) // 2], generator)
        if self.twist is not None:
            # Two rows, so that a reward that sums over the batch is told from one that does not.
            mask_id = self.model.kernel.mask_id
            clean = x[:1].masked_fill(x[:1] == mask_id, 1 if mask_id == 0 else 0)
            self.twist.exact(clean.repeat(2, 1))

    def _probe_step(self, x: Tensor, step: Step, generator: Generator) -> Evaluation:
        evaluation = self.evaluate(x, step.t, generator)
        q = self.propose(x, evaluation, step)
        p = self.model.transition(x, _known(evaluation.prediction), step, q.sites)
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
    def populations(self) -> int:
        return self.model.populations

    def start(self, rows: int, generator: Generator | None) -> Tensor:
        return self.model.start(rows, generator)

    def evaluate(
        self, x: Tensor, t: float, generator: Generator | None, parent: Evaluation | None = None
    ) -> Evaluation:
        if t == 0:
            return self._judge(x)
        wants_gradient = self.proposal.needs_gradient
        with torch.set_grad_enabled(wants_gradient):
            seen = one_hot(x, self.model.vocab_size).to(self.model.dtype).requires_grad_() if wants_gradient else x
            memory = self._remember(x, generator, parent)
            prediction = self.model.predict(seen, clock(self.model, memory, t))
            nothing = torch.zeros_like(x[:, 0], dtype=self.model.dtype)
            if self.twist is None:
                return Evaluation(nothing, prediction, memory=memory)
            if self.twist.idle(t, parent) and not wants_gradient:
                log_twist, carry = self.twist.rest(nothing, parent)
                return Evaluation(log_twist, prediction, carry=carry, memory=memory)
            look = Look(seen, self.model.clean(prediction), t, self.model.kernel.mask_id)
            estimate = self.twist.estimate(look, generator)
            gradient = _gradient(estimate, seen) if wants_gradient else None
        reward = estimate.detach()
        ramp = self.twist.adapt(t, reward, parent)
        log_twist, carry = self.twist.potential(self.twist.scale(t, ramp), reward, parent)
        return Evaluation(log_twist, prediction.detach(), reward, gradient, carry, memory, ramp)

    def _remember(self, x: Tensor, generator: Generator | None, parent: Evaluation | None) -> Tensor | None:
        """What the kernel wants kept of this state, if it has a memory."""
        kernel = self.model.kernel
        if not isinstance(kernel, Remembering):
            return None
        if parent is None or parent.prediction is None:
            return kernel.remember(x, None, None, generator)
        return kernel.remember(x, parent.memory, self.model.clean(parent.prediction), generator)

    def _judge(self, x: Tensor) -> Evaluation:
        """The end: the reward itself, whatever the potentials before it."""
        if (x == self.model.kernel.mask_id).any():
            raise ValueError("masked sites are left at t = 0: let the kernel open all sites by its last step")
        if self.twist is None:
            return Evaluation(torch.zeros_like(x[:, 0], dtype=self.model.dtype))
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
        return self.model.log_prob(y, x, _known(evaluation.prediction), step, q.sites)

    def log_ratio(self, y: Tensor, x: Tensor, evaluation: Evaluation, step: Step, q: Measure) -> Tensor:
        """log p(y | x_t) - log q(y | x_t), (P,)."""
        return self.log_p(y, x, evaluation, step, q) - q.log_prob(y)

    def move(self, x: Tensor, evaluation: Evaluation, step: Step, generator: Generator | None) -> tuple[Tensor, Tensor]:
        q = self.propose(x, evaluation, step)
        y = q.sample(generator)
        return y, self.log_ratio(y, x, evaluation, step, q)

    def spent(self) -> Mapping[str, int]:
        rows = {"denoiser": sum(meter.rows for meter in self.model.denoiser_meters)}
        if self.twist is not None:
            rows["reward"] = self.twist.meter.rows
        if self.proposal.meters:
            rows["proposal"] = sum(meter.rows for meter in self.proposal.meters)
        return rows


def _known(prediction: Tensor | None) -> Tensor:
    assert prediction is not None, "particles are evaluated before they move"
    return prediction


def _gradient(estimate: Tensor, x: Tensor) -> Tensor:
    if not estimate.requires_grad:
        raise ValueError(
            "the estimate of the reward does not depend on x_t in a way that can be differentiated: let the denoiser "
            "or Value function take one-hots, or use a proposal without gradients"
        )
    return torch.autograd.grad(estimate.sum(), x)[0]


@dataclass(frozen=True)
class Method:
    """A steering with its way of resampling: a row of the table of methods. Call it to run it."""

    steering: Steering
    resample: Resampler = systematic
    when: Trigger = ess_below(0.5)

    def __call__(
        self,
        num_particles: int,
        populations: int = 1,
        *,
        generator: Generator | None = None,
        progress: bool = False,
    ) -> Result:
        return smc(
            self.steering,
            num_particles,
            populations,
            resample=self.resample,
            when=self.when,
            generator=generator,
            progress=progress,
        )


def pretrained(model: Diffusion) -> Method:
    """The model alone, unsteered."""
    return Method(Steering(model), when=never)


def best_of_n(model: Model, tilt: Tilt) -> Method:
    """Independent samples, judged at the end: take `result.best()`, which is no posterior draw."""
    return Method(Steering(model, replace(tilt, ramp=end_ramp, potential=difference)), when=never)


def svdd(model: Model, tilt: Tilt) -> Method:
    """All N candidates descend from one survivor of the step before; each population's log_z is its missing weight."""
    return Method(Steering(model, tilt), one_survivor, always)


def nested_svdd(model: Model, tilt: Tilt, candidates: int = 4) -> Method:
    """SVDD within groups of `candidates` and SMC between them, which makes it exact for any group size."""
    return Method(Steering(model, tilt), nested(systematic, candidates), always)


def fk_steering(model: Model, tilt: Tilt, potential: Potential = difference, interval: int = 1) -> Method:
    """Feynman-Kac steering: the reward in full, at every `interval`-th step, where it is resampled, and at the end."""
    when = every(interval)
    counted = {step.t for step in model.steps if step.index and step.index % interval == 0} | {0.0}

    def ramp(t: float) -> float:
        return float(interval == 1 or t in counted)

    return Method(Steering(model, replace(tilt, ramp=ramp, potential=potential)), multinomial, when)


def smc_base(model: Model, tilt: Tilt) -> Method:
    """SMC with the model itself as proposal."""
    return Method(Steering(model, tilt))


def smc_grad(model: Model, tilt: Tilt, clip: float | None = 3.0) -> Method:
    """SMC with the first-order gradient proposal, clipped: few draws make steep gradients and heavy-tailed weights."""
    return Method(Steering(model, tilt, Gradient(clip=clip)))


def prop_grad(model: Model, tilt: Tilt, clip: float | None = 3.0) -> Method:
    """The gradient proposal alone, without resampling: classifier guidance."""
    return Method(Steering(model, tilt, Gradient(clip=clip)), when=never)


def product(models: Sequence[Diffusion], powers: Sequence[float], tilt: Tilt | None = None) -> Method:
    """SMC for prod_k p_k^a_k with its locally optimal proposal."""
    return Method(Steering(Product(models, powers), tilt, Optimal()))


def cfg(conditional: Diffusion, unconditional: Diffusion, scale: float, tilt: Tilt | None = None) -> Method:
    """Classifier-free guidance with the weights that make it exact."""
    return Method(Steering(guided(conditional, unconditional, scale), tilt, Guided()))
