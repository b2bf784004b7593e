"""Proposals: the distributions q(x_s | x_t) that particles are moved by.

Any q that covers p is correct, since the weight contains log p - log q; a good one makes the weights equal. Given x_t
the best is q* ∝ p(x_s | x_t) · exp(psi_s(x_s)) (Doucet et al., 2000; docs/references.md). q and p share the sites that
a low-confidence kernel opens: p's prediction chooses them unless the proposal does, and the measure stores them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

from tokensteer.core.categorical.product import normalise_each
from tokensteer.core.categorical.sites import Categoricals, unread
from tokensteer.core.kernels.kernel import Stateful
from tokensteer.core.kernels.masked import Ancestral
from tokensteer.core.kernels.measure import Reveal, SiteMeasure
from tokensteer.core.models.diffusion import Model, located
from tokensteer.core.models.prediction import stored_prediction
from tokensteer.core.models.product import Product
from tokensteer.core.numerics.batching import Meter
from tokensteer.core.particles.path import Evaluation, Measure, Sites, Step
from tokensteer.core.proposals.after_remasking import AfterRemasking
from tokensteer.core.twists.tilt import Tilt


@runtime_checkable
class Proposal(Protocol):
    """q(· | x_t), normalised."""

    @property
    def needs_gradient(self) -> bool:
        """Whether evaluations must hold the gradient of r_hat."""
        return False

    @property
    def meters(self) -> tuple[Meter, ...]:
        """Row counts of the proposal's own networks."""
        return ()

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> Measure: ...


class SiteProposal(Proposal, Protocol):
    """A proposal that factorises over sites, so it can be tilted further."""

    def __call__(
        self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None
    ) -> SiteMeasure: ...


@runtime_checkable
class BuiltOn(Protocol):
    """A proposal made of others, its `parts`."""

    @property
    def parts(self) -> Sequence[Proposal]: ...


Kind = TypeVar("Kind")


def of_kind(proposal: Proposal, kind: type[Kind]) -> list[Kind]:
    """The proposals of this kind among a proposal and its parts, the outermost first."""
    found = [proposal] if isinstance(proposal, kind) else []
    parts = proposal.parts if isinstance(proposal, BuiltOn) else ()
    return found + [inner for part in parts for inner in of_kind(part, kind)]


def chosen(x: Tensor, log_x0: Categoricals, evaluation: Evaluation, step: Step, model: Model) -> Sites | None:
    """The sites that the kernel opens, by the order of log_x0 and the state of a stateful kernel."""
    if evaluation.memory is not None and isinstance(model.kernel, Stateful):
        return model.kernel.recall(x, log_x0, step, evaluation.memory)
    return model.kernel.choose(x, log_x0, step)


@dataclass(frozen=True)
class FromModel(SiteProposal):
    """q = p: the pretrained model itself; for a product, its first model."""

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> SiteMeasure:
        log_x0 = model.clean(stored_prediction(evaluation))
        return model.step_with(x, log_x0, step, chosen(x, log_x0, evaluation, step, model))


@dataclass(frozen=True)
class Guided(SiteProposal):
    """Classifier-free guidance (Ho and Salimans, 2022): tokens from the normalised prod_k mu_k^a_k. In a step that a
    product corrects for remasking, sites are masked again before the tokens of others are predicted."""

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> SiteMeasure:
        if evaluation.prediction is None and predicts_late(self, model, step):
            q, prediction = model.step_with(x, unread(x, model.vocab_size, model.dtype), step, None), None
        else:
            prediction = stored_prediction(evaluation)
            sites = chosen(x, model.clean(prediction), evaluation, step, model)
            q = model.step_with(x, normalise_each(model.combined(prediction), model.kernel.mask_id), step, sites)
        if not (isinstance(model, Product) and model.corrects(step) and isinstance(q, Reveal)):
            return q
        return AfterRemasking(q, model, prediction, step, located(model.networks, step.t, x))


def predicts_late(proposal: Proposal, model: Model, step: Step) -> bool:
    """Whether a step predicts for the sites that it leaves open, and needs no prediction at x_t."""
    corrects = isinstance(model, Product) and model.corrects(step)
    return corrects and isinstance(proposal, Guided) and isinstance(model.kernel, Ancestral)


@dataclass(frozen=True)
class Optimal(SiteProposal):
    """q ∝ the model's transition: the locally optimal proposal of a product without a tilt, but for steps that are
    corrected for remasking: there `Guided` has more even weights."""

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> SiteMeasure:
        prediction = stored_prediction(evaluation)
        sites = chosen(x, model.clean(prediction), evaluation, step, model)
        p = model.transition(x, prediction, step, sites)
        return p.normalise().with_mass(p.total() if twist is None else None)
