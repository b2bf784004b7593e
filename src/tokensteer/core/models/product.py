"""Products of powers of models, prod_k p_k^a_k; classifier-free guidance is one.

The target is the path measure with tokens at masked sites weighted by prod_k mu_k^a_k. It is unnormalised:
c^l = sum_v prod_k mu_k^a_k(v) is not one, and that is what its weights are made of. For powers that sum to one the
three conventions below agree; otherwise they are different targets.

Where there is no mask, tokens and schedule are told apart by the pace g(x_s | x_t), what the schedule alone makes of a
step (`Interpolating.log_pace`): the default is g · prod_k (p_k/g)^a_k. Its paths have the measure
prod_k p_k(x_0)^a_k · (noise from x_0) in the limit of many steps, for any noise and any powers, and with the mask as
noise it is the above. (Weighing the tokens by prod_k mu_k^a_k here too would not do: mu sees the token that stands
there already, and would count it anew at each step.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from tokensteer.core.categorical.product import Powers, product_of_powers
from tokensteer.core.categorical.sites import Categoricals, SiteDistributions
from tokensteer.core.kernels.kernel import NO_MASK, Kernel
from tokensteer.core.kernels.masked import Ancestral
from tokensteer.core.kernels.measure import Reveal, SiteMeasure, Table
from tokensteer.core.kernels.noise import Interpolating
from tokensteer.core.kernels.ranked import Ranked
from tokensteer.core.models.denoiser import Time
from tokensteer.core.models.diffusion import Diffusion, predict_all
from tokensteer.core.models.prediction import Prediction
from tokensteer.core.numerics.domains import check_number
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.particles.path import Sites, Step

Convention = Callable[[Reveal, float, float], Reveal]


def denoiser_powers(measure: Reveal, total: float, survival: float) -> Reveal:
    """Exponents on the denoiser, the schedule to the power one: the default, and the best for sum of powers != 1."""
    return measure


def kernel_powers(measure: Reveal, total: float, survival: float) -> Reveal:
    """Whole kernels to their powers: opening and staying too are raised to the sum of the powers."""
    return replace(measure, log_stay=_times(total, measure.log_stay), log_move=_times(total, measure.log_move))


def paper_powers(measure: Reveal, total: float, survival: float) -> Reveal:
    """`kernel_powers` over Z(x_s), the normaliser of the forward kernel's power: rho^s + (1 - rho)^s for each site
    open in x_s, with rho = alpha_t / alpha_s and s the sum of the powers."""
    measure = kernel_powers(measure, total, survival)
    log_z = math.log(survival**total + (1.0 - survival) ** total)
    masked = measure.masked
    return replace(
        measure,
        log_stay=torch.where(masked, measure.log_stay, measure.log_stay - log_z),
        log_move=torch.where(masked, measure.log_move - log_z, measure.log_move),
    )


def _times(power: float, log_p: Tensor) -> Tensor:
    """power · log_p, where no mass stays no mass."""
    return torch.where(log_p == NEVER, NEVER, power * log_p)


@dataclass(frozen=True)
class Product:
    """prod_k p_k^a_k, for models that differ in their denoisers only; powers may be negative.

    A token has no mass where a model with a positive power gives none. Remasking counts c^l anew each time a site is
    masked and opened again; `correct_remasking` undoes that: newly opened sites are judged given the sites open in both
    x_t and x_s, and each remasked site is divided by its c^l there. It costs one more denoiser call for particles that
    were remasked, and needs denoisers of full support (any softmax): a token that is impossible given x_t may be
    possible given less of it, and no proposal made at x_t would find it. Without it the target is the path measure of
    the paper.
    """

    models: Sequence[Diffusion]
    powers: Sequence[float]
    convention: Convention = denoiser_powers
    correct_remasking: bool = True

    def __post_init__(self) -> None:
        if not self.models or len(self.models) != len(self.powers):
            raise ValueError(
                f"Product: {len(self.models)} models and {len(self.powers)} powers; give one power to each model"
            )
        first = self.models[0]
        for k, model in enumerate(self.models[1:], 1):
            same = (
                model.kernel == first.kernel
                and tuple(model.steps) == tuple(first.steps)
                and model.vocab_size == first.vocab_size
                and torch.equal(model.template, first.template)
            )
            if not same:
                raise ValueError(
                    f"Product: model {k} differs from model 0 in kernel, steps, vocabulary or template; only the "
                    "denoisers may differ: make it with dataclasses.replace(model_0, denoiser=...)"
                )
        for k, power in enumerate(self.powers):
            check_number(f"Product: powers[{k}]", power)
        check_number("Product: the first power", self.powers[0], "(0, inf)", "put a model of positive power first")
        raised = (Ancestral, Ranked) if self.convention is paper_powers else (Ancestral, Ranked, Interpolating)
        if self.convention is not denoiser_powers and not isinstance(self.kernel, raised):
            raise ValueError(
                "Product: kernel_powers is for Ancestral and Interpolating kernels, paper_powers for Ancestral ones, "
                f"not {type(self.kernel).__name__}: leave the convention at denoiser_powers"
            )
        if (
            self.correct_remasking
            and self.convention is not denoiser_powers
            and any(self.kernel.remasks(step) for step in self.steps)
        ):
            raise ValueError("Product: the remasking correction holds for denoiser_powers; set correct_remasking=False")

    @property
    def kernel(self) -> Kernel:
        return self.models[0].kernel

    @property
    def steps(self) -> Sequence[Step]:
        return self.models[0].steps

    @property
    def vocab_size(self) -> int:
        return self.models[0].vocab_size

    @property
    def dtype(self) -> torch.dtype:
        return self.models[0].dtype

    @property
    def device(self) -> torch.device:
        return self.models[0].device

    @property
    def populations(self) -> int:
        return self.models[0].populations

    @property
    def base(self) -> Diffusion:
        return self.models[0]

    @property
    def networks(self) -> Sequence[Diffusion]:
        return self.models

    def start(self, rows: int, generator: Generator | None) -> Tensor:
        return self.models[0].start(rows, generator)

    def predict(self, x: Tensor, t: Time, before: Prediction | None = None) -> Prediction:
        return predict_all(self.models, x, t, before if self.ignores_time else None)

    @property
    def ignores_time(self) -> bool:
        return all(model.ignores_time for model in self.models)

    def relaxed(self, x: Tensor, t: Time) -> Tensor:
        return self.models[0].relaxed(x, t)

    def clean(self, prediction: Prediction) -> SiteDistributions:
        return prediction.laws()

    def combined(self, prediction: Prediction) -> SiteDistributions:
        mask_id = self.kernel.mask_id
        read = torch.ones_like(prediction.x, dtype=torch.bool) if mask_id == NO_MASK else prediction.x == mask_id
        # All models have their laws in the same places; one of power 0 has no say and is not read.
        counted = [k for k, power in enumerate(self.powers) if power]
        laws = Powers(tuple(prediction.stores[k] for k in counted), tuple(self.powers[k] for k in counted))
        return SiteDistributions(laws, torch.where(read, prediction.laws().index, -1))

    def log_start(self, x: Tensor) -> Tensor:
        return self.models[0].log_start(x)

    def step_with(self, x: Tensor, log_x0: Categoricals, step: Step, sites: Sites | None) -> SiteMeasure:
        return self.models[0].step_with(x, log_x0, step, sites)

    def transition(self, x: Tensor, prediction: Prediction, step: Step, sites: Sites | None) -> SiteMeasure:
        if sites is None:
            sites = self.kernel.choose(x, self.clean(prediction), step)
        measure = self.kernel(x, self.combined(prediction), step, sites)
        if isinstance(measure, Reveal):  # what is fixed is pinned last, so that no convention counts it
            measure = self.convention(measure, sum(self.powers), self.kernel.survival(step))
        if not isinstance(measure, Table):
            return self.models[0].pin(measure, len(x))
        # Without a mask, opening is not apart from choosing a token: kernels are raised, and their pace is taken back.
        kernels = (m.step_with(x, prediction.laws(k), step, sites).dense() for k, m in enumerate(self.models))
        log_p = product_of_powers((kernel.log_p for kernel in kernels), self.powers)
        if self.convention is denoiser_powers and isinstance(self.kernel, Interpolating):
            too_much = (sum(self.powers) - 1.0) * self.kernel.log_pace(x, step, log_p)
            log_p = torch.where(log_p == NEVER, NEVER, log_p - too_much)
        return self.models[0].pin(Table(log_p, sites, x=x), len(x))

    def log_prob(self, y: Tensor, x: Tensor, prediction: Prediction, step: Step, sites: Sites | None) -> Tensor:
        if not (self.correct_remasking and self.kernel.remasks(step)):
            return self.transition(x, prediction, step, sites).log_prob(y)
        remasked = (x != self.kernel.mask_id) & (y == self.kernel.mask_id)
        common = x.masked_fill(remasked, self.kernel.mask_id)
        # The time is the same, so rows that have not changed are reused.
        prediction = predict_all(self.models, common, step.t, prediction)
        log_c = _opened(self.transition(common, prediction, step, sites)).log_x0.mass(remasked)
        log_p = self.transition(x, prediction, step, sites).log_prob(y)
        return log_p - log_c.sum(-1)


def _opened(measure: SiteMeasure) -> Reveal:
    assert isinstance(measure, Reveal), "only masked processes mask again"
    return measure


def guided(conditional: Diffusion, unconditional: Diffusion, scale: float) -> Product:
    """Classifier-free guidance as a target: p(x | c)^scale · p(x)^(1 - scale). scale = 1 is the conditional model."""
    return Product((conditional, unconditional), (scale, 1.0 - scale))
