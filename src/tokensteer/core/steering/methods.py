"""The named methods: a steering with a way of resampling. Sources are in docs/references.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Generator

from tokensteer.core.models.denoiser import Denoiser
from tokensteer.core.models.diffusion import Diffusion, Model
from tokensteer.core.models.product import Product, guided
from tokensteer.core.numerics.domains import check_whole
from tokensteer.core.particles.loop import smc
from tokensteer.core.particles.path import Record
from tokensteer.core.particles.resampling import Resampler, heaviest, multinomial, nested, one_survivor, systematic
from tokensteer.core.particles.result import Result
from tokensteer.core.particles.triggers import Trigger, always, ess_below, every, never
from tokensteer.core.proposals.amortised import Amortised, OtherHead
from tokensteer.core.proposals.gradient import Gradient
from tokensteer.core.proposals.proposal import Guided, Proposal, of_kind
from tokensteer.core.steering.steering import Steering
from tokensteer.core.twists.potentials import Potential, difference
from tokensteer.core.twists.ramps import Adaptive
from tokensteer.core.twists.ramps import end as end_ramp
from tokensteer.core.twists.tilt import Tilt

CLIP = 1.0  # of the gradient proposal, chosen on digits and mnist (docs/results/proposals.md)
LOOKS = 10  # in a run, where each takes draws
SMOOTHING = 0.5  # of the estimates of smc_grad, chosen on digits (docs/results/proposals.md)
LONG = 32  # sites, so that one step changes little; with two, ten looks gave nine times the scatter of log Z


@dataclass(frozen=True)
class Method:
    """A steering with its resampler and trigger. Call it to run it."""

    steering: Steering
    resample: Resampler = systematic
    when: Trigger = ess_below(0.5)

    def __call__(
        self,
        num_particles: int,
        populations: int = 1,
        *,
        generator: Generator | None = None,
        memory: str | float | None = None,
        progress: bool = False,
        on_step: Callable[[Record], None] | None = None,
        keep_states: bool | int = False,
    ) -> Result:
        return smc(
            self.steering,
            num_particles,
            populations,
            resample=self.resample,
            when=self.when,
            generator=generator,
            memory=memory,
            progress=progress,
            on_step=on_step,
            keep_states=keep_states,
        )


def pretrained(model: Diffusion) -> Method:
    """The model alone, unsteered."""
    return Method(Steering(model), when=never)


def best_of_n(model: Model, tilt: Tilt) -> Method:
    """Independent samples, weighted at the end: take `result.best()`, which is no posterior draw."""
    return Method(Steering(model, replace(tilt, ramp=end_ramp, potential=difference)), when=never)


def svdd(model: Model, tilt: Tilt) -> Method:
    """SVDD (Li et al., 2024): all N candidates descend from one survivor; a population's weight is in its log_z."""
    return Method(Steering(model, tilt), one_survivor, always)


def greedy_svdd(model: Model, tilt: Tilt) -> Method:
    """SVDD whose survivor is the candidate of highest weight. It has no known target: take `result.best()`."""
    return Method(Steering(model, tilt), heaviest, always)


def nested_svdd(model: Model, tilt: Tilt, candidates: int = 4) -> Method:
    """SVDD within groups of `candidates` and SMC between groups: exact for any group size."""
    return Method(Steering(model, tilt), nested(systematic, candidates), always)


def fk_steering(model: Model, tilt: Tilt, potential: Potential = difference, interval: int = 1) -> Method:
    """FK steering (Singhal et al., 2025): resampling by the full reward at every `interval`-th step and at the end."""
    check_whole("fk_steering: interval", interval)
    counted = {step.t for step in model.steps if step.index and step.index % interval == 0} | {0.0}

    def ramp(t: float) -> float:
        return float(interval == 1 or t in counted)

    return Method(Steering(model, replace(tilt, ramp=ramp, potential=potential)), multinomial, every(interval))


def usual_trigger(model: Model, tilt: Tilt) -> Trigger:
    """ESS below a half. Where each look takes draws and long sequences change little between looks, ten looks in a run:
    as exact and about as precise as a look at every step, for a fraction of the reward rows."""
    costly = tilt.drawn and tilt.potential.memoryless and not isinstance(tilt.ramp, Adaptive)
    return ess_below(0.5, LOOKS if costly and _long(model) else None)


def _long(model: Model) -> bool:
    return model.base.template.shape[-1] >= LONG


def smc_base(model: Model, tilt: Tilt) -> Method:
    """SMC with the model itself as proposal (Ou et al., 2026, as are `smc_grad` and `smc_amot`)."""
    return Method(Steering(model, tilt), when=usual_trigger(model, tilt))


def smc_grad(model: Model, tilt: Tilt, clip: float | None = CLIP) -> Method:
    """SMC with the gradient proposal for tokens, clipped: with few draws gradients are steep and weights heavy-tailed.

    Estimates come with gradients, so weights are looked at in every step. For long sequences those with fresh noise are
    averaged over recent steps, unless the tilt has a `smoothing` of its own.
    """
    gradient = Gradient(clip=clip, tokens_only=True)
    return Method(Steering(model, tilt.with_smoothing(usual_smoothing(model, tilt, gradient)), gradient))


def usual_smoothing(model: Model, tilt: Tilt, proposal: Proposal) -> float | None:
    """The smoothing that a proposal needs: the tilt's own or, where gradients make an estimate with fresh noise in
    every step of a long sequence, `SMOOTHING`."""
    each_step = any(gradient.every == 1 and gradient.draws is None for gradient in of_kind(proposal, Gradient))
    noisy = each_step and tilt.drawn and tilt.estimator.random and _long(model)
    return SMOOTHING if tilt.smoothing is None and noisy else tilt.smoothing


def prop_grad(model: Model, tilt: Tilt, clip: float | None = 3.0) -> Method:
    """The gradient proposal without resampling: classifier guidance (Dhariwal and Nichol, 2021)."""
    return Method(Steering(model, tilt, Gradient(clip=clip)), when=never)


def smc_amot(model: Model, tilt: Tilt, proposal: Denoiser | Amortised | OtherHead) -> Method:
    """SMC with a learned proposal, a network or a head trained for this target."""
    own = proposal if isinstance(proposal, Amortised | OtherHead) else Amortised(proposal)
    return Method(Steering(model, tilt, own), when=usual_trigger(model, tilt))


def prop_amot(model: Model, tilt: Tilt, proposal: Denoiser | Amortised | OtherHead) -> Method:
    """The learned proposal without resampling."""
    return replace(smc_amot(model, tilt, proposal), when=never)


def product(models: Sequence[Diffusion], powers: Sequence[float], tilt: Tilt | None = None) -> Method:
    """SMC for prod_k p_k^a_k: sites as the kernel opens them, tokens from the normalised product."""
    return Method(Steering(Product(models, powers), tilt, Guided()))


def smc_cfg(conditional: Diffusion, unconditional: Diffusion, scale: float, tilt: Tilt | None = None) -> Method:
    """Classifier-free guidance with exact weights (Lee et al., 2025)."""
    return Method(Steering(guided(conditional, unconditional, scale), tilt, Guided()))
