"""The locally optimal proposal q* ∝ p(x_s | x_t) · exp(psi_s(x_s)) by enumeration (Doucet et al., 2000;
docs/references.md)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokensteer.core.kernels.measure import Listed
from tokensteer.core.models.context import Query
from tokensteer.core.models.diffusion import Model, located
from tokensteer.core.models.prediction import stored_prediction
from tokensteer.core.numerics.domains import check_whole
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.numerics.rows import distinct, log_sum_runs, same_rows
from tokensteer.core.particles.path import Evaluation, Step
from tokensteer.core.proposals.proposal import Proposal, chosen
from tokensteer.core.twists.estimators import NoisyState
from tokensteer.core.twists.tilt import Tilt


@dataclass(frozen=True)
class Enumerated(Proposal):
    """q* ∝ p(x_s | x_t) · exp(psi_s(x_s)) over every x_s that p can reach; for few open sites or small vocabularies.

    The denoiser is called once more at each step, on the distinct candidates x_s.
    """

    limit: int = 1_000_000

    def __post_init__(self) -> None:
        check_whole("Enumerated.limit", self.limit)

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> Listed:
        prediction = stored_prediction(evaluation)
        sites = chosen(x, model.clean(prediction), evaluation, step, model)
        p = model.transition(x, prediction, step, sites)
        # Particles of equal x may still differ in their fixed sites, ramp and context, and the kernel's memory.
        aim = torch.zeros_like(x[:, 0]) if twist is None else twist.aim(step.s, evaluation)
        reach = same_rows((p.dense().log_p > NEVER).flatten(1).long())
        of = located(model.networks, step.s, x, 1 if twist is None else twist.populations).of
        population = torch.zeros_like(x[:, 0]) if of is None else of
        first, row = distinct(torch.cat([x, torch.stack([reach, same_rows(aim.unsqueeze(-1)), population], -1)], -1))
        if evaluation.memory is not None:
            first = row = torch.arange(len(x), device=x.device)
        owner, candidates = _at_least_one(*p.take(first).support(self.limit), x[first], model.kernel.mask_id)
        log_p = log_q = p.take(first[owner]).log_prob(candidates)
        of_tilt = twist is not None and (twist.log_lookahead is not None or not twist.idle(step.s, evaluation))
        if of_tilt or (model.looks_ahead and step.s > 0):
            population = population[first[owner]]
            once, which = distinct(torch.cat([candidates, population.unsqueeze(-1)], -1))
            owners = None if of is None else population[once]
            r, log_lookahead = reward_ahead(candidates[once], step.s, model, twist, owners)
            log_q = log_q + (aim[first[owner]] * r[which] + log_lookahead[which]).to(log_q)
        lengths = torch.bincount(owner, minlength=len(first))
        mass = log_sum_runs(log_q, lengths)
        # Where q* has no mass the weight is 0 whatever is drawn: use p, which leaves no mask at the end, or the uniform
        # distribution if p has no mass either, with any token in place of a mask that would be left.
        without, reached = (mass == NEVER)[owner], log_sum_runs(log_p, lengths)[owner]
        if step.s == 0:
            left = (candidates == model.kernel.mask_id) & (reached == NEVER).unsqueeze(-1)
            candidates = candidates.masked_fill(left, _a_token(model.kernel.mask_id))
        even = -lengths[owner].to(log_q.dtype).log()
        instead = torch.where(reached == NEVER, even, log_p - reached)
        log_q = torch.where(without, instead, log_q - mass[owner])
        return Listed(candidates, log_q, owner, row, sites, mass[row])


def _at_least_one(owner: Tensor, candidates: Tensor, x: Tensor, mask_id: int) -> tuple[Tensor, Tensor]:
    """At least one candidate for every particle: one that can reach no state gets a sequence to which p gives no mass,
    and dies."""
    stuck = (torch.bincount(owner, minlength=len(x)) == 0).nonzero().squeeze(-1)
    somewhere = x[stuck].masked_fill(x[stuck] == mask_id, _a_token(mask_id))
    order = torch.cat([owner, stuck]).sort(stable=True)
    return order.values, torch.cat([candidates, somewhere])[order.indices]


def _a_token(mask_id: int) -> int:
    """Some id that is not the mask."""
    return 1 if mask_id == 0 else 0


def reward_ahead(
    x: Tensor, t: float, model: Model, twist: Tilt | None, of: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """r_hat(x) and the log-lookahead, (P,), for a twist that x alone determines; masks may be left at t = 0. `of` is
    the population of each row, where contexts differ."""
    if twist is not None and (twist.estimator.random or not twist.potential.memoryless or twist.smoothing):
        raise ValueError(
            "Enumerated needs a log-twist that x_s alone determines: use an estimator that is not random, such as "
            "Exact() or Value(...), the difference potential, and no smoothing"
        )
    r, log_lookahead = torch.zeros(2, len(x), dtype=torch.float64, device=x.device)
    clean = (x != model.kernel.mask_id).all(-1) if t == 0 else torch.zeros_like(x[:, 0], dtype=torch.bool)
    if twist is not None and clean.any():
        r[clean] = twist.exact(x[clean], None if of is None else of[clean])
    if not clean.all():
        noisy = x[~clean]
        prediction = model.predict(noisy, Query(t, of).take(~clean))
        if model.looks_ahead and t > 0:
            log_lookahead[~clean] = model.log_lookahead(prediction)
        if twist is not None:
            populations = None if of is None else of[~clean]
            state = NoisyState(noisy, model.clean(prediction), t, model.kernel.mask_id, of=populations)
            r[~clean] = twist.estimate(state, None)
            if twist.log_lookahead is not None:
                log_lookahead[~clean] += twist.lookahead(state)
    return r, log_lookahead
