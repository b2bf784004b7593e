"""Products of powers of models, prod_k p_k^a_k (Hinton, 2002; Ou et al., 2026; docs/references.md).

The target is the path measure with tokens at masked sites weighted by prod_k mu_k^a_k. It is unnormalised: the weights
are made of c^l = sum_v prod_k mu_k^a_k(v), which is not one. For powers that sum to one the three conventions below
agree; otherwise they are different targets.

Without a mask, the schedule's part of a step is its pace g(x_s | x_t) (`Interpolating.log_pace`), and the default is
g · prod_k (p_k/g)^a_k. In the limit of many steps its paths have the measure prod_k p_k(x_0)^a_k · (noise from x_0),
for any noise and any powers; with the mask as noise it is the above. (Weighting tokens by prod_k mu_k^a_k would be
wrong: mu depends on the visible token at the site, which would count again at each step.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from tokensteer.core.categorical.product import Powers, product_of_powers
from tokensteer.core.categorical.sites import SiteDistributions
from tokensteer.core.kernels.kernel import NO_MASK
from tokensteer.core.kernels.masked import Ancestral
from tokensteer.core.kernels.measure import Reveal, SiteMeasure, Table
from tokensteer.core.kernels.noise import Interpolating
from tokensteer.core.kernels.ranked import Ranked
from tokensteer.core.models.context import Query
from tokensteer.core.models.diffusion import Diffusion, Model, predict_all
from tokensteer.core.models.prediction import Prediction
from tokensteer.core.numerics.capture import capturing
from tokensteer.core.numerics.domains import check_callable, check_flags, check_number
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.particles.path import Sites, Step

Convention = Callable[[Reveal, float, float], Reveal]

BOUND = 30.0  # the largest |log c^l| that a twist counts: a site without mass now may have some when others have opened


def denoiser_powers(measure: Reveal, total: float, survival: float) -> Reveal:
    """Powers of the denoiser, the schedule to the power one: the default, and the best if powers do not sum to one."""
    return measure


def kernel_powers(measure: Reveal, total: float, survival: float) -> Reveal:
    """Powers of whole kernels: the probabilities of opening and staying are raised to the sum of the powers."""
    return replace(measure, log_stay=_times(total, measure.log_stay), log_move=_times(total, measure.log_move))


def paper_powers(measure: Reveal, total: float, survival: float) -> Reveal:
    """`kernel_powers` over Z(x_s), the normaliser of the forward kernel's power: rho^s + (1 - rho)^s for each site
    open in x_s, with rho = alpha_t / alpha_s and s the sum of the powers (Ou et al., 2026)."""
    measure = kernel_powers(measure, total, survival)
    log_z = math.log(survival**total + (1.0 - survival) ** total)
    masked = measure.masked
    return replace(
        measure,
        log_stay=torch.where(masked, measure.log_stay, measure.log_stay - log_z),
        log_move=torch.where(masked, measure.log_move - log_z, measure.log_move),
    )


def _times(power: float, log_p: Tensor) -> Tensor:
    """power · log_p; -inf stays -inf."""
    return torch.where(log_p == NEVER, NEVER, power * log_p)


@dataclass(frozen=True)
class Product(Model):
    """prod_k p_k^a_k, for models that differ in their denoisers or contexts only; powers may be negative.

    A token has no mass where a model with a positive power gives none. With remasking, c^l counts again each time a
    site is masked and reopened. `correct_remasking` undoes that: newly opened sites are evaluated given the sites open
    in both x_t and x_s, and each remasked site is divided by its c^l there. With `Guided`, and neither a
    tilt nor a look-ahead, these are the only predictions of a step; else they are made for remasked particles beside
    those at x_t. It needs denoisers of full support (any softmax): a token that is impossible given x_t may be
    possible given fewer sites, which only `Guided` proposes from. Without it the target is that of Ou et al., 2026.

    A site counts its c^l when it opens. With `lookahead` the log-twist has the sum of log c^l over the sites still
    masked, so that a particle is not resampled for how many sites it has opened. It changes no target. The sum is right
    for sites that are independent given x_t: where they are not, as in images, it overstates small differences. So
    None, the default, looks ahead only if the powers do not sum to one: if they do, log c^l is near 0.
    """

    models: Sequence[Diffusion]
    powers: Sequence[float]
    convention: Convention = denoiser_powers
    correct_remasking: bool = True
    lookahead: bool | None = None

    def __post_init__(self) -> None:
        if not self.models or len(self.models) != len(self.powers):
            raise ValueError(
                f"Product: {len(self.models)} models and {len(self.powers)} powers; give one power to each model"
            )
        if not all(isinstance(model, Diffusion) for model in cast("Sequence[object]", self.models)):
            raise TypeError("Product: every model must be a Diffusion: products of products are one product of powers")
        check_flags(self)
        check_callable("Product.convention", self.convention, "a measure, the sum of powers and alpha_t/alpha_s")
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
                    "denoisers and contexts may differ: make it with dataclasses.replace(model_0, denoiser=...)"
                )
        counts = {model.populations for model in self.models if model.populations > 1}
        if len(counts) > 1:
            raise ValueError(f"Product: contexts of {sorted(counts)} rows: give each model one row, or equally many")
        for k, power in enumerate(self.powers):
            check_number(f"Product: powers[{k}]", power)
        check_number("Product: the first power", self.powers[0], "(0, inf)", "put a model of positive power first")
        raised = (Ancestral, Ranked) if self.convention is paper_powers else (Ancestral, Ranked, Interpolating)
        if self.convention is not denoiser_powers and not isinstance(self.kernel, raised):
            raise ValueError(
                "Product: kernel_powers is for Ancestral, Ranked and Interpolating kernels, paper_powers for Ancestral "
                f"and Ranked ones, not {type(self.kernel).__name__}: leave the convention at denoiser_powers"
            )
        if self.convention is paper_powers and sum(self.powers) < 0:
            raise ValueError(
                f"Product: the powers sum to {sum(self.powers):g}, and paper_powers divides by the forward kernel to "
                "that power, which is 0 for some states: leave the convention at denoiser_powers"
            )
        if (
            self.correct_remasking
            and self.convention is not denoiser_powers
            and any(self.kernel.remasks(step) for step in self.steps)
        ):
            raise ValueError("Product: the remasking correction holds for denoiser_powers; set correct_remasking=False")

    @property
    def base(self) -> Diffusion:
        return self.models[0]

    @property
    def networks(self) -> Sequence[Diffusion]:
        return self.models

    @property
    def populations(self) -> int:
        return max(model.populations for model in self.models)

    def combined(self, prediction: Prediction) -> SiteDistributions:
        mask_id = self.kernel.mask_id
        read = torch.ones_like(prediction.x, dtype=torch.bool) if mask_id == NO_MASK else prediction.x == mask_id
        # All stores share one index; models of power 0 are not read.
        counted = [k for k, power in enumerate(self.powers) if power]
        powers = Powers(tuple(prediction.stores[k] for k in counted), tuple(self.powers[k] for k in counted))
        return SiteDistributions(powers, torch.where(read, prediction.laws().index, -1))

    @property
    def looks_ahead(self) -> bool:
        ahead = abs(sum(self.powers) - 1.0) > 1e-6 if self.lookahead is None else self.lookahead
        return ahead and self.kernel.mask_id != NO_MASK

    def log_lookahead(self, prediction: Prediction) -> Tensor:
        log_c = self.combined(prediction).mass(prediction.x == self.kernel.mask_id).double()
        return log_c.clamp(-BOUND, BOUND).sum(-1)

    def transition(self, x: Tensor, prediction: Prediction, step: Step, sites: Sites | None) -> SiteMeasure:
        if sites is None:
            sites = self.kernel.choose(x, self.clean(prediction), step)
        measure = self.kernel(x, self.combined(prediction), step, sites)
        if isinstance(measure, Reveal):  # fixed sites are pinned last, so that no convention counts them
            measure = self.convention(measure, sum(self.powers), self.kernel.survival(step))
            if not isinstance(measure, Reveal):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"Product.convention must return the measure it changes, got {type(measure).__name__}")
        if not isinstance(measure, Table):
            return self.models[0].pin(measure, len(x))
        # Without a mask, whole kernels are raised to their powers, and divided by the surplus powers of their pace.
        kernels = (m.step_with(x, prediction.laws(k), step, sites).dense() for k, m in enumerate(self.models))
        log_p = product_of_powers((kernel.log_p for kernel in kernels), self.powers)
        if self.convention is denoiser_powers and isinstance(self.kernel, Interpolating):
            too_much = (sum(self.powers) - 1.0) * self.kernel.log_pace(x, step, log_p)
            log_p = torch.where(log_p == NEVER, NEVER, log_p - too_much)
        return self.models[0].pin(Table(log_p, sites, x=x), len(x))

    def corrects(self, step: Step) -> bool:
        """Whether a step predicts twice, the second time given the sites open before and after it."""
        return self.correct_remasking and self.kernel.remasks(step)

    def given_common(self, x: Tensor, remasked: Tensor, prediction: Prediction | None, query: Query) -> Prediction:
        """The predictions with the sites `remasked` (P, L) masked; `prediction` is at x, at the same time, if known."""
        # Rows in which no site is remasked are reused. Finding them reads the device.
        before = None if capturing() else prediction
        return predict_all(self.models, x.masked_fill(remasked, self.kernel.mask_id), query, before)

    def log_prob(self, y: Tensor, x: Tensor, prediction: Prediction, step: Step, sites: Sites | None) -> Tensor:
        if not self.corrects(step):
            return self.transition(x, prediction, step, sites).log_prob(y)
        if sites is None:  # the kernel chooses by what is predicted at x_t, as in the move
            sites = self.kernel.choose(x, self.clean(prediction), step)
        given = self.given_common(x, self._remasked(y, x), prediction, Query(step.t))
        return self.log_prob_given(y, x, given, step, sites)

    def log_prob_given(self, y: Tensor, x: Tensor, given: Prediction, step: Step, sites: Sites | None) -> Tensor:
        """log p(y | x_t), (P,), of a step that corrects: `given` is what the networks predict for the sites open in
        both."""
        given_common = self.transition(given.x, given, step, sites)
        assert isinstance(given_common, Reveal), "only masked processes remask"
        log_c = given_common.log_x0.mass(self._remasked(y, x))
        log_p = self.transition(x, given, step, sites).log_prob(y)
        return log_p - log_c.sum(-1)

    def _remasked(self, y: Tensor, x: Tensor) -> Tensor:
        return (x != self.kernel.mask_id) & (y == self.kernel.mask_id)


def guided(conditional: Diffusion, unconditional: Diffusion, scale: float) -> Product:
    """Classifier-free guidance as a target, p(x | c)^scale · p(x)^(1 - scale) (Lee et al., 2025); 1 for p(x | c). The
    sampler of that name, which has no such target, is `guided_reference`."""
    both = Product((conditional, unconditional), (scale, 1.0 - scale))
    # A model of power 0 is not run, unless its contexts are what the populations are counted by.
    alone = scale == 1 and both.populations == conditional.populations
    return Product((conditional,), (1.0,)) if alone else both
