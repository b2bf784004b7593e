"""Learned proposals: tokens from another network, or from another head on the hidden states of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from tokensteer.core.categorical.forms import HiddenLogits
from tokensteer.core.categorical.sites import SiteDistributions
from tokensteer.core.kernels.measure import SiteMeasure
from tokensteer.core.models.denoiser import Denoiser, check_head
from tokensteer.core.models.diffusion import Model, clock
from tokensteer.core.models.prediction import Prediction, prediction_of
from tokensteer.core.numerics.batching import Meter
from tokensteer.core.particles.path import Evaluation, Step
from tokensteer.core.proposals.proposal import chosen
from tokensteer.core.twists.tilt import Tilt


@dataclass(frozen=True)
class Amortised:
    """Tokens from another network, learned or not, in place of the model's; the weight keeps its full p/q.

    `own_order` lets this network choose the sites that a low-confidence kernel opens, for p too. That changes the
    reference process, and with it the target.
    """

    denoiser: Denoiser
    own_order: bool = False
    meter: Meter = field(default_factory=Meter, init=False, repr=False, compare=False)
    needs_gradient: bool = field(default=False, init=False, repr=False)

    @property
    def meters(self) -> tuple[Meter, ...]:
        return (self.meter,)

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> SiteMeasure:
        if isinstance(evaluation.proposed, Prediction):
            log_x0 = evaluation.proposed.laws()
        else:
            self.meter.count(len(x))
            log_x0 = self.denoiser(x, clock(model, evaluation.memory, step.t))
        order = log_x0 if self.own_order else model.clean(prediction_of(evaluation))
        return model.step_with(x, log_x0, step, chosen(x, order, evaluation, step, model))


@dataclass(frozen=True)
class OtherHead:
    """Tokens from another head on the hidden states that the model's own head reads: q costs no pass of its own.

    The law is softmax(head(change(h))) with h the states that were kept with the prediction, whose denoiser must be
    made by `from_hidden`; `change` works on each state alone, (K, H) -> (K, H).
    """

    head: nn.Linear
    change: Callable[[Tensor], Tensor] | None = None
    needs_gradient: bool = field(default=False, init=False, repr=False)
    meters: tuple[Meter, ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        check_head(self.head)

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> SiteMeasure:
        prediction = prediction_of(evaluation)
        kept, order = prediction.stores[0], model.clean(prediction)
        if not isinstance(kept, HiddenLogits):
            raise ValueError(
                "OtherHead reads hidden states, and the model keeps none: make the denoiser of a masked process by "
                "from_hidden(trunk, head, mask_id), and do not build Gradient on it; or use Amortised(network)"
            )
        if self.head.out_features != kept.vocab_size:
            raise ValueError(f"the other head says {self.head.out_features} tokens, the model's own {kept.vocab_size}")
        states = kept.states if self.change is None else self.change(kept.states)
        tokens = SiteDistributions(replace(kept, states=states, head=self.head), prediction.laws().index)
        return model.step_with(x, tokens, step, chosen(x, order, evaluation, step, model))
