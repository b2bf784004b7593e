"""Proposals: what particles are moved by.

Any q is right as long as it covers p and the weight carries log p - log q; a good one makes the weights equal. Given
x_t the best is q* ∝ p(x_s | x_t) · exp(psi_s(x_s)). A proposal shares with p the sites that a low-confidence kernel
opens: they are chosen by p's prediction unless it says otherwise, and passed on in the measure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

from tokensteer.core.categorical.product import normalise_each
from tokensteer.core.categorical.sites import Categoricals
from tokensteer.core.kernels.kernel import Stateful
from tokensteer.core.kernels.measure import SiteMeasure
from tokensteer.core.models.diffusion import Model
from tokensteer.core.models.prediction import prediction_of
from tokensteer.core.numerics.batching import Meter
from tokensteer.core.particles.path import Evaluation, Measure, Sites, Step
from tokensteer.core.twists.tilt import Tilt


@runtime_checkable
class Proposal(Protocol):
    """q(· | x_t), normalised. With `needs_gradient` the evaluation holds the gradient of r_hat. `meters` count the rows
    of its own networks."""

    @property
    def needs_gradient(self) -> bool: ...
    @property
    def meters(self) -> tuple[Meter, ...]: ...
    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> Measure: ...


class SiteProposal(Proposal, Protocol):
    """A proposal that factorises over sites, so that it can be tilted further."""

    def __call__(
        self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None
    ) -> SiteMeasure: ...


@runtime_checkable
class BuiltOn(Protocol):
    """A proposal that changes another one, its `base`."""

    @property
    def base(self) -> Proposal: ...


Kind = TypeVar("Kind")


def inmost(proposal: Proposal, kind: type[Kind]) -> Kind | None:
    """The proposal, or the one it is built on, of this kind."""
    while not isinstance(proposal, kind):
        if not isinstance(proposal, BuiltOn):
            return None
        proposal = proposal.base
    return proposal


def chosen(x: Tensor, log_x0: Categoricals, evaluation: Evaluation, step: Step, model: Model) -> Sites | None:
    """The sites that the kernel opens, by the order of log_x0 and what it remembers of the particles."""
    if evaluation.memory is not None and isinstance(model.kernel, Stateful):
        return model.kernel.recall(x, log_x0, step, evaluation.memory)
    return model.kernel.choose(x, log_x0, step)


@dataclass(frozen=True)
class FromModel:
    """q = p: the pretrained model itself; for a product, its first model."""

    needs_gradient: bool = field(default=False, init=False, repr=False)
    meters: tuple[Meter, ...] = field(default=(), init=False, repr=False)

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> SiteMeasure:
        log_x0 = model.clean(prediction_of(evaluation))
        return model.step_with(x, log_x0, step, chosen(x, log_x0, evaluation, step, model))


@dataclass(frozen=True)
class Guided:
    """The usual classifier-free guidance: tokens from the normalised prod_k mu_k^a_k, sites as the kernel chooses."""

    needs_gradient: bool = field(default=False, init=False, repr=False)
    meters: tuple[Meter, ...] = field(default=(), init=False, repr=False)

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> SiteMeasure:
        prediction = prediction_of(evaluation)
        sites = chosen(x, model.clean(prediction), evaluation, step, model)
        return model.step_with(x, normalise_each(model.combined(prediction), model.kernel.mask_id), step, sites)


@dataclass(frozen=True)
class Optimal:
    """q ∝ the model's transition: the locally optimal proposal of a product without a tilt."""

    needs_gradient: bool = field(default=False, init=False, repr=False)
    meters: tuple[Meter, ...] = field(default=(), init=False, repr=False)

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> SiteMeasure:
        prediction = prediction_of(evaluation)
        sites = chosen(x, model.clean(prediction), evaluation, step, model)
        p = model.transition(x, prediction, step, sites)
        return p.normalise().with_mass(p.total() if twist is None else None)
