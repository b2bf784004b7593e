"""The first-order gradient proposal (SMC_grad)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from tokensteer.core.categorical.gradient_tilt import gradient_tilt
from tokensteer.core.kernels.kernel import NO_MASK
from tokensteer.core.kernels.measure import SiteMeasure
from tokensteer.core.models.diffusion import Model
from tokensteer.core.models.prediction import Prediction
from tokensteer.core.numerics.batching import Meter
from tokensteer.core.numerics.domains import check_number, check_whole
from tokensteer.core.particles.path import Evaluation, Step
from tokensteer.core.proposals.proposal import FromModel, SiteProposal
from tokensteer.core.twists.tilt import Tilt


@dataclass(frozen=True)
class Gradient:
    """q^l(w) ∝ base^l(w) · exp(kappa · g^l[w]) with g the gradient of r_hat at x_t and kappa = ramp(s)/kl.

    The mask entry is tilted too, so that q does not depend on an offset of g; `tokens_only` leaves alone which sites
    open. `clip` bounds |kappa · (g^l[w] - g^l[x_t])|. The gradient is the dearest part of a step. With `every` = k it
    is taken at each k-th step and followed until the next; with `draws` = m it is that of an estimate of its own from m
    clean sequences, if the tilt has another number of them, and the tilt's are drawn only where weights are looked at.
    Both are right for any number, and a little less sharp.
    """

    base: SiteProposal = field(default_factory=FromModel)
    clip: float | None = None
    tokens_only: bool = False
    every: int = 1
    draws: int | None = None
    needs_gradient: bool = field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        check_whole("Gradient.every", self.every, hint="1 takes the gradient at each step")
        if self.draws is not None:
            check_whole("Gradient.draws", self.draws, hint="None takes the tilt's own")
        if self.clip is not None:
            check_number("Gradient.clip", self.clip, "[0, inf]", "None does not clip")

    @property
    def meters(self) -> tuple[Meter, ...]:
        return self.base.meters

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> SiteMeasure:
        if twist is None or not isinstance(evaluation.gradient, Prediction):
            raise ValueError("Gradient needs a reward to follow: give Steering a Tilt, or use Optimal() or Guided()")
        # What cannot move needs no tilt.
        mask_id = model.kernel.mask_id
        everywhere = mask_id == NO_MASK or model.kernel.remasks(step)
        movable = (x == mask_id) | everywhere
        slope = evaluation.gradient.laws()
        scale = twist.aim(step.s, evaluation).unsqueeze(-1).expand_as(x)
        h = gradient_tilt(slope, movable, scale, x, self.clip, masked_only=not everywhere)
        q = self.base(x, evaluation, step, model, twist)
        return q.tilt_tokens(h) if self.tokens_only else q.tilt(h)
