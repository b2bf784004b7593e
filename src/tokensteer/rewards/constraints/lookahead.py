"""Hard constraints with look-ahead.

Let mu be a distribution over tokens that factorises over sites. If all later steps drew from it, a masked site would
end as mu, and an open one would keep its token with probability rho_t, that of never being masked again (1 for kernels
that do not remask), or end as mu. V_t(x_t; mu) is the probability that an automaton accepts such a draw: one pass over
the sites. It is used in

- the twist: psi_t = ramp(t) · r_hat/kl + log V_t, finite before the end, and -inf there if the constraint is broken;
- the proposal: q(y) = base(y) · V_s(y; mu) / sum_z base(z) · V_s(z; mu) (`Constrained`).

For a denoiser that factorises, V_t is the value function of the sampler, remasking or not: all weights are equal, and
log Z = log V of the template exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Generator, Tensor

from tokensteer.core.kernels.kernel import NO_MASK
from tokensteer.core.models.denoiser import ignores_time
from tokensteer.core.models.diffusion import Diffusion, Model
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.proposals.proposal import FromModel, SiteProposal
from tokensteer.core.steering.steering import Steering
from tokensteer.core.twists.estimators import NoisyState
from tokensteer.core.twists.ramps import end as end_ramp
from tokensteer.core.twists.tilt import Reward, Tilt
from tokensteer.rewards.constraints.automaton import Automaton
from tokensteer.rewards.constraints.conditioned import Constrained
from tokensteer.rewards.constraints.final_masses import final_masses
from tokensteer.rewards.constraints.recall import Recall
from tokensteer.rewards.constraints.staying import Kept, kept

FLOOR = -1e4  # log V where no draw is accepted: below all others, and finite as a twist must be


@dataclass(frozen=True)
class Satisfies:
    """0, or the reward `soft`, for sequences that the automaton accepts, and -inf for all others."""

    automaton: Automaton
    soft: Reward | None = None

    def __call__(self, x0: Tensor, *context: Tensor) -> Tensor:
        accepted = self.automaton.accepts(x0.argmax(-1) if x0.is_floating_point() else x0)
        reward = torch.zeros_like(accepted, dtype=torch.float64) if self.soft is None else self.soft(x0, *context)
        return torch.where(accepted, reward, NEVER)


@dataclass(frozen=True)
class LookAhead:
    """log V_t(x_t), the term of the log-twist that the ramp does not scale; `kept` is kept(model). It has no gradient:
    `Constrained` conditions on it instead. What it computes is left in `recall` for the proposal."""

    automaton: Automaton
    kept: Kept
    recall: Recall | None = field(default=None, repr=False)

    def __call__(self, tilt: Tilt, look: NoisyState) -> Tensor:
        rho, masked = self.kept.at(look.t, len(look.x)), look.ids == look.mask_id
        if self.recall is not None and not (rho < 1).any() and len(look.x):
            log_v = self.recall.solve(look.ids, look.tokens, fresh=look.t >= self.kept.times[-1])
            if log_v is not None:
                return log_v.clamp(min=FLOOR)
        final = final_masses(self.automaton, rho, look.tokens, look.mask_id, masked, masked)
        return self.automaton.transitions.log_accept(final.at(look.ids)).clamp(min=FLOOR)


@dataclass(frozen=True)
class SoftEstimate:
    """The estimate of the soft reward alone, 0 if there is none: draws that break the constraint would all be -inf."""

    soft: Tilt | None = None

    def __post_init__(self) -> None:
        if not isinstance(cast("object", self.soft), Tilt | None):
            raise TypeError(f"SoftEstimate.soft must be a Tilt or None, got {self.soft!r}")

    @property
    def random(self) -> bool:
        return self.soft is not None and self.soft.estimator.random

    @property
    def ignores_time(self) -> bool:
        return self.soft is None or ignores_time(self.soft.estimator)

    @property
    def drawn(self) -> bool:
        return self.soft is not None and self.soft.drawn

    def with_draws(self, draws: int) -> SoftEstimate:
        return SoftEstimate(None if self.soft is None else self.soft.with_draws(draws))

    def __call__(self, tilt: Tilt, look: NoisyState, generator: Generator | None) -> Tensor:
        if self.soft is None:
            return torch.zeros(len(look.x), dtype=torch.float64, device=look.x.device)
        before = self.soft.meter.rows
        r = self.soft.estimate(look, generator)
        tilt.meter.count(self.soft.meter.rows - before)
        return r


def constrain(
    model: Model, automaton: Automaton, tilt: Tilt | None = None, base: SiteProposal | None = None
) -> Steering:
    """The target model(x_0) · exp(r(x_0)/kl) on the sequences that the automaton accepts, with look-ahead.

    `tilt` is an optional soft reward; `base` (by default the model) chooses sites and the token distribution that is
    conditioned. Raises if no sequence that keeps the template is accepted.
    """
    if model.kernel.mask_id == NO_MASK:
        raise ValueError("constraints need a masked process, and this kernel has no mask: use Ancestral")
    if tilt is not None and tilt.log_lookahead is not None:
        raise ValueError("constrain: this tilt has a log_lookahead already: give a tilt without one")
    automaton = automaton.to(model.device)
    _check_possible(model, automaton)
    rho, recall = kept(model), Recall(automaton, model.kernel.mask_id, _timeless(model))
    soft = Tilt(Satisfies(automaton), ramp=end_ramp) if tilt is None else tilt
    reward = Satisfies(automaton, None if tilt is None else tilt.reward)
    ahead = LookAhead(automaton, rho, recall)
    twist = replace(soft, reward=reward, estimator=SoftEstimate(tilt), log_lookahead=ahead)
    proposal = Constrained(automaton, rho, FromModel() if base is None else base, recall=recall)
    return Steering(model, twist, proposal)


def _timeless(model: Model) -> bool:
    """Whether a prediction depends on the state alone, not on time or the population."""
    alike = all(len(part) == 1 for network in model.networks for part in network.conditions)
    return isinstance(model, Diffusion) and model.ignores_time and alike


def _check_possible(model: Model, automaton: Automaton) -> None:
    if automaton.vocab_size != model.vocab_size:
        raise ValueError(
            f"the automaton is over {automaton.vocab_size} tokens and the model over {model.vocab_size}, its mask "
            f"included: make it with vocab_size={model.vocab_size}"
        )
    ids, mask_id = torch.arange(model.vocab_size, device=model.device), model.kernel.mask_id
    for row, canvas in enumerate(model.start(model.populations, None)):
        free = (canvas == mask_id).unsqueeze(-1)
        if not automaton.possible(len(canvas), torch.where(free, ids != mask_id, ids == canvas.unsqueeze(-1))):
            which = f" (row {row})" if model.populations > 1 else ""
            raise ValueError(
                f"a pattern that cannot be met: no sequence of length {len(canvas)} that keeps the template{which} "
                "satisfies it. Check the pattern, the length and the fixed tokens"
            )
