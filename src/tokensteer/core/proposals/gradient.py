"""The first-order gradient proposal, SMC_grad (Ou et al., 2026; as guidance: Vignac et al., 2023; Nisonoff et al.,
2025; docs/references.md)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from tokensteer.core.categorical.gradient_tilt import gradient_tilt
from tokensteer.core.kernels.kernel import NO_MASK
from tokensteer.core.kernels.measure import SiteMeasure
from tokensteer.core.models.diffusion import Model
from tokensteer.core.models.prediction import Prediction
from tokensteer.core.numerics.batching import Meter
from tokensteer.core.numerics.domains import check_flags, check_number, check_whole
from tokensteer.core.particles.path import Evaluation, Step
from tokensteer.core.proposals.proposal import FromModel, SiteProposal
from tokensteer.core.twists.tilt import Tilt


@dataclass(frozen=True)
class Gradient(SiteProposal):
    """q^l(w) ∝ base^l(w) · exp(kappa · g^l[w]) with g the gradient of r_hat at x_t and kappa = scale · ramp(s)/kl.

    The mask entry is tilted too, so that q does not depend on an offset of g; `tokens_only` does not change which sites
    open. `clip` bounds |kappa · (g^l[w] - g^l[x_t])|. The gradient is the most expensive part of a step. With
    `every` = k it is computed at every k-th step and reused until the next. With `draws` = m it is that of a separate
    estimate from m clean sequences, and the tilt's own are drawn only where weights are read. Both keep the target and
    make q slightly less accurate.
    """

    base: SiteProposal = field(default_factory=FromModel)
    clip: float | None = None
    tokens_only: bool = False
    scale: float = 1.0
    every: int = 1
    draws: int | None = None

    def __post_init__(self) -> None:
        check_whole("Gradient.every", self.every, hint="1 computes the gradient at each step")
        if self.draws is not None:
            check_whole("Gradient.draws", self.draws, hint="None uses those of the tilt")
        if self.clip is not None:
            check_number("Gradient.clip", self.clip, "[0, inf]", "None does not clip")
        check_number("Gradient.scale", self.scale, "[0, inf)", "1 is the first-order expansion of the twist")
        check_flags(self)

    @property
    def needs_gradient(self) -> bool:
        return True

    @property
    def parts(self) -> tuple[SiteProposal]:
        return (self.base,)

    @property
    def meters(self) -> tuple[Meter, ...]:
        return self.base.meters

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> SiteMeasure:
        if twist is None or not isinstance(evaluation.gradient, Prediction):
            raise ValueError("Gradient needs a reward: give Steering a Tilt, or use Optimal() or Guided()")
        mask_id = model.kernel.mask_id
        everywhere = mask_id == NO_MASK or model.kernel.remasks(step)
        movable = (x == mask_id) | everywhere
        slope = evaluation.gradient.laws()
        scale = (self.scale * twist.aim(step.s, evaluation)).unsqueeze(-1).expand_as(x)
        h = gradient_tilt(slope, movable, scale, x, self.clip, masked_only=not everywhere)
        q = self.base(x, evaluation, step, model, twist)
        return q.tilt_tokens(h) if self.tokens_only else q.tilt(h)
