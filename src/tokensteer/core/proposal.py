"""Proposals: what particles are moved by.

Any q is right as long as it covers p and the weight carries log p - log q; a good one makes the weights equal. Given
x_t the best is q* ∝ p(x_s | x_t) · exp(psi_s(x_s)). A proposal shares with p the sites that a low-confidence kernel
opens: they are chosen by p's prediction unless it says otherwise, and passed on in the measure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from tokensteer.core.bent import bends
from tokensteer.core.chunks import Meter
from tokensteer.core.denoiser import Denoiser, check_head
from tokensteer.core.derived import normal
from tokensteer.core.domains import check_number, check_whole
from tokensteer.core.draws import NEVER
from tokensteer.core.estimates import Look
from tokensteer.core.kernel import NO_MASK, Remembering
from tokensteer.core.laws import Headed
from tokensteer.core.listing import distinct, log_sum_runs, same_rows
from tokensteer.core.measure import Listed, Measure, SiteMeasure, Sites
from tokensteer.core.model import Model, clock
from tokensteer.core.prediction import Prediction
from tokensteer.core.schedule import Step
from tokensteer.core.smc import Evaluation
from tokensteer.core.tokens import Laws, Tokens
from tokensteer.core.twist import Tilt, difference


class Proposal(Protocol):
    """q(· | x_t), normalised. `needs_gradient` asks for the gradient of r_hat in the evaluation."""

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


Kind = TypeVar("Kind")


def inmost(proposal: Proposal, kind: type[Kind]) -> Kind | None:
    """The proposal, or the one that it builds on, of this kind."""
    inner: object = proposal
    while inner is not None and not isinstance(inner, kind):
        inner = getattr(inner, "base", None)
    return inner


def _prediction(evaluation: Evaluation) -> Prediction:
    if not isinstance(evaluation.prediction, Prediction):
        raise ValueError("a proposal was asked to move particles that have not been evaluated")
    return evaluation.prediction


def chosen(x: Tensor, log_x0: Laws, evaluation: Evaluation, step: Step, model: Model) -> Sites | None:
    """The sites that the kernel opens, by the order of log_x0 and what it remembers of the particles."""
    if evaluation.memory is not None and isinstance(model.kernel, Remembering):
        return model.kernel.recall(x, log_x0, step, evaluation.memory)
    return model.kernel.choose(x, log_x0, step)


@dataclass(frozen=True)
class FromModel:
    """q = p: the pretrained model itself; for a product, its first model."""

    needs_gradient: bool = field(default=False, init=False, repr=False)
    meters: tuple[Meter, ...] = field(default=(), init=False, repr=False)

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> SiteMeasure:
        log_x0 = model.clean(_prediction(evaluation))
        return model.step_with(x, log_x0, step, chosen(x, log_x0, evaluation, step, model))


@dataclass(frozen=True)
class Guided:
    """The usual classifier-free guidance: tokens from the normalised prod_k mu_k^a_k, sites as the kernel chooses."""

    needs_gradient: bool = field(default=False, init=False, repr=False)
    meters: tuple[Meter, ...] = field(default=(), init=False, repr=False)

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> SiteMeasure:
        prediction = _prediction(evaluation)
        sites = chosen(x, model.clean(prediction), evaluation, step, model)
        return model.step_with(x, normal(model.combined(prediction), model.kernel.mask_id), step, sites)


@dataclass(frozen=True)
class Optimal:
    """q ∝ the model's transition: the locally optimal proposal of a product without a tilt."""

    needs_gradient: bool = field(default=False, init=False, repr=False)
    meters: tuple[Meter, ...] = field(default=(), init=False, repr=False)

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> SiteMeasure:
        prediction = _prediction(evaluation)
        sites = chosen(x, model.clean(prediction), evaluation, step, model)
        p = model.transition(x, prediction, step, sites)
        return p.normalise().with_mass(p.total() if twist is None else None)


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
        h = bends(slope, movable, scale, x, self.clip, masked_only=not everywhere)
        q = self.base(x, evaluation, step, model, twist)
        return q.tilt_tokens(h) if self.tokens_only else q.tilt(h)


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
        order = log_x0 if self.own_order else model.clean(_prediction(evaluation))
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
        prediction = _prediction(evaluation)
        kept, order = prediction.stores[0], model.clean(prediction)
        if not isinstance(kept, Headed):
            raise ValueError(
                "OtherHead reads hidden states, and the model keeps none: make the denoiser of a masked process by "
                "from_hidden(trunk, head, mask_id), and do not build Gradient on it; or use Amortised(network)"
            )
        if self.head.out_features != kept.vocab_size:
            raise ValueError(f"the other head says {self.head.out_features} tokens, the model's own {kept.vocab_size}")
        states = kept.states if self.change is None else self.change(kept.states)
        tokens = Tokens(replace(kept, states=states, head=self.head), prediction.laws().index)
        return model.step_with(x, tokens, step, chosen(x, order, evaluation, step, model))


@dataclass(frozen=True)
class Enumerated:
    """q* ∝ p(x_s | x_t) · exp(psi_s(x_s)) over every x_s that p can reach; for few open sites or small vocabularies.

    It looks one step ahead: the denoiser is asked once more at each step, about the distinct candidates.
    """

    limit: int = 1_000_000
    needs_gradient: bool = field(default=False, init=False, repr=False)
    meters: tuple[Meter, ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        check_whole("Enumerated.limit", self.limit)

    def __call__(self, x: Tensor, evaluation: Evaluation, step: Step, model: Model, twist: Tilt | None) -> Listed:
        prediction = _prediction(evaluation)
        sites = chosen(x, model.clean(prediction), evaluation, step, model)
        p = model.transition(x, prediction, step, sites)
        # Twins may still differ in what their templates hold fixed, in their ramp, and in what the kernel remembers.
        aim = torch.zeros_like(x[:, 0]) if twist is None else twist.aim(step.s, evaluation)
        reach = same_rows((p.dense().log_p > NEVER).flatten(1).long())
        first, row = distinct(torch.cat([x, torch.stack([reach, same_rows(aim.unsqueeze(-1))], -1)], -1))
        if evaluation.memory is not None:
            first = row = torch.arange(len(x), device=x.device)
        owner, candidates = _at_least_one(*p.take(first).support(self.limit), x[first], model.kernel.mask_id)
        log_p = log_q = p.take(first[owner]).log_prob(candidates)
        if twist is not None and (twist.chance is not None or not twist.idle(step.s, evaluation)):
            once, which = distinct(candidates)
            r, chance = reward_ahead(candidates[once], step.s, model, twist)
            log_q = log_q + (aim[first[owner]] * r[which] + chance[which]).to(log_q)
        lengths = torch.bincount(owner, minlength=len(first))
        mass = log_sum_runs(log_q, lengths)
        # Where nothing has a future any law will do, since the weight is zero whatever is drawn: p, which leaves no
        # mask at the end, or where p reaches nothing either an even one.
        without, reached = (mass == NEVER)[owner], log_sum_runs(log_p, lengths)[owner]
        even = -lengths[owner].to(log_q.dtype).log()
        instead = torch.where(reached == NEVER, even, log_p - reached)
        log_q = torch.where(without, instead, log_q - mass[owner])
        return Listed(candidates, log_q, owner, row, sites, mass[row])


def _at_least_one(owner: Tensor, candidates: Tensor, x: Tensor, mask_id: int) -> tuple[Tensor, Tensor]:
    """A list for every particle: one that can go nowhere gets a sequence that p gives no mass to, and dies of it."""
    stuck = (torch.bincount(owner, minlength=len(x)) == 0).nonzero().squeeze(-1)
    somewhere = x[stuck].masked_fill(x[stuck] == mask_id, 1 if mask_id == 0 else 0)
    order = torch.cat([owner, stuck]).sort(stable=True)
    return order.values, torch.cat([candidates, somewhere])[order.indices]


def reward_ahead(x: Tensor, t: float, model: Model, twist: Tilt) -> tuple[Tensor, Tensor]:
    """r_hat(x) and the log-chance, (P,), for a twist that x alone determines. Masks left at t = 0 are valued too."""
    if twist.estimator.random or twist.potential is not difference:
        raise ValueError(
            "Enumerated needs a log-twist that x_s alone determines: use an estimator that is not random, such as "
            "Exact() or Value(...), and the difference potential"
        )
    r, chance = torch.zeros(2, len(x), dtype=torch.float64, device=x.device)
    clean = (x != model.kernel.mask_id).all(-1) if t == 0 else torch.zeros_like(x[:, 0], dtype=torch.bool)
    if clean.any():
        r[clean] = twist.exact(x[clean])
    if not clean.all():
        noisy = x[~clean]
        look = Look(noisy, model.clean(model.predict(noisy, t)), t, model.kernel.mask_id)
        r[~clean] = twist.estimate(look, None)
        if twist.chance is not None:
            chance[~clean] = twist.ahead(look)
    return r, chance
