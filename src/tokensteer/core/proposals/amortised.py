"""Learned proposals (Ou et al., 2026; docs/references.md): another network, or another head on the model's states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn

from tokensteer.core.categorical.forms import HiddenLogits
from tokensteer.core.categorical.product import between, normalise_each
from tokensteer.core.categorical.sites import SiteDistributions, by_site
from tokensteer.core.kernels.measure import SiteMeasure
from tokensteer.core.models.denoiser import Denoiser, check_head
from tokensteer.core.models.diffusion import Model, clock, located
from tokensteer.core.models.prediction import Prediction, stored_prediction
from tokensteer.core.numerics.batching import Meter
from tokensteer.core.numerics.domains import check_callable, check_flags, check_number
from tokensteer.core.particles.path import Evaluation, Step
from tokensteer.core.proposals.proposal import Proposal, SiteProposal, chosen, of_kind
from tokensteer.core.twists.tilt import Tilt


@dataclass(frozen=True)
class Amortised(SiteProposal):
    """Tokens from another network, learned or not, in place of the model's.

    With `own_order` this network also chooses the sites that a low-confidence kernel opens, for p too. That changes the
    reference process, and with it the target.

    `scale` is how much of what was learned counts: token distributions are p^(1 - scale) · q^scale, normalised. A
    network errs a little at each site, and the errors of all sites add up in a weight; below 1 they shrink faster than
    the steering does.
    """

    denoiser: Denoiser
    own_order: bool = False
    scale: float = 1.0
    meter: Meter = field(default_factory=Meter, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_number("Amortised.scale", self.scale, "(0, 1]")
        check_flags(self)

    @property
    def meters(self) -> tuple[Meter, ...]:
        return (self.meter,)

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> SiteMeasure:
        if isinstance(evaluation.proposed, Prediction):
            log_x0 = evaluation.proposed.laws()
        else:
            self.meter.count(len(x))
            query = located(model.networks, clock(model, evaluation.memory, step.t), x)
            log_x0 = self.denoiser(x, query.t, *model.base.given(query, len(x)))
        if self.scale != 1.0:
            p = model.clean(stored_prediction(evaluation))
            log_x0 = normalise_each(between(p, by_site(log_x0), self.scale), model.kernel.mask_id)
        order = log_x0 if self.own_order else model.clean(stored_prediction(evaluation))
        return model.step_with(x, log_x0, step, chosen(x, order, evaluation, step, model))


@dataclass(frozen=True)
class OtherHead(SiteProposal):
    """Tokens from softmax(head(change(h))), with h the hidden states of the model: q needs no forward pass of its own.

    The denoiser must be made by `from_hidden`; `change` acts on each state alone, (K, H) -> (K, H).

    `scale` is how much of the change counts: states are h + scale · (change(h) - h). A change that was learned at one
    kl may be too weak at a smaller one: try more than 1 there.
    """

    head: nn.Linear
    change: Callable[[Tensor], Tensor] | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_head(self.head)
        check_number("OtherHead.scale", self.scale, "(0, inf)")
        if self.change is None and self.scale != 1.0:
            raise ValueError("OtherHead.scale is how much of the change counts, and there is no change: leave it out")
        if self.change is not None:
            check_callable("OtherHead.change", self.change, "hidden states (K, H), which returns others")

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> SiteMeasure:
        prediction = stored_prediction(evaluation)
        kept, order = prediction.stores[0], model.clean(prediction)
        if not isinstance(kept, HiddenLogits):
            raise ValueError(
                "OtherHead reads hidden states, and the model stores none: make the denoiser of a masked process by "
                "from_hidden(trunk, head, mask_id), and do not build Gradient on it; or use Amortised(network)"
            )
        if self.head.out_features != kept.vocab_size:
            raise ValueError(f"OtherHead has {self.head.out_features} tokens, the model's own head {kept.vocab_size}")
        states = self._changed(kept.states)
        tokens = SiteDistributions(replace(kept, states=states, head=self.head), prediction.laws().index)
        return model.step_with(x, tokens, step, chosen(x, order, evaluation, step, model))

    def _changed(self, states: Tensor) -> Tensor:
        if self.change is None:
            return states
        changed, size, kind = cast("object", self.change(states)), self.head.in_features, self.head.weight.dtype
        got = f"{changed.dtype} {tuple(changed.shape)}" if isinstance(changed, Tensor) else type(changed).__name__
        mixed = torch.is_autocast_enabled(states.device.type)
        if isinstance(changed, Tensor) and changed.shape == (len(states), size) and (mixed or changed.dtype == kind):
            return changed if self.scale == 1.0 else states + self.scale * (changed - states)
        raise ValueError(
            f"OtherHead.change must return a state for each that it is given, {kind} ({len(states)}, {size}) as the "
            f"head reads them, got {got}"
        )


def learned_parts(proposal: Proposal) -> list[Amortised | OtherHead]:
    """The learned proposals among a proposal and its parts."""
    return [*of_kind(proposal, Amortised), *of_kind(proposal, OtherHead)]
