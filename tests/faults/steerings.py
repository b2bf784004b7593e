"""Random tilts, proposals and constraints on a random model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

import tokensteer as ts
from tests.faults.choices import Choices
from tests.faults.models import Made
from tests.faults.networks import TableReward, value
from tests.helpers.extended import MaskGITExtended
from tokensteer import rewards

FLOATS = (*[torch.float64] * 2, torch.float32, torch.bfloat16, torch.float16)
LISTED = 64  # states at most where all of them are listed at every step


@dataclass(frozen=True, eq=False)  # equal to itself alone: parts have no hash
class Aim:
    """A steering, and the parts of it that its samples are compared with."""

    steering: ts.Steering
    made: Made
    proposal: ts.Proposal
    tilt: ts.Tilt | None
    reward: TableReward | None
    rule: rewards.Automaton | None = None

    @property
    def differentiable(self) -> bool:
        return self.tilt is not None and self.tilt.differentiable

    def of_population(self, row: int, proposal: ts.Proposal | None = None) -> ts.Steering:
        """The steering of one population alone, which can be enumerated; its target is that of the population."""
        model = self.made.of_population(row)
        # A proposal with an order of its own changes the target; any other does not, and the model is the simplest.
        changes = isinstance(self.proposal, ts.Amortised) and self.proposal.own_order
        proposal = proposal or (self.proposal if changes else ts.FromModel())
        if self.rule is None:
            return ts.Steering(model, self.tilt, proposal)
        return rewards.constrain(model, self.rule, self.tilt, proposal)  # pyright: ignore[reportArgumentType]


def draw_reward(choices: Choices, made: Made, differentiable: bool, mild: bool) -> TableReward:
    length, size = made.canvas.shape[1], made.model.vocab_size
    scale = choices.pick("worth", 4, 4, 1, 0)
    dtypes = FLOATS if differentiable or scale == 4 else (*FLOATS, torch.int64, *[torch.bool] * 2 * (scale == 0))
    dtype = choices.pick("reward", *dtypes)
    noise = choices.rand(*(size,) * length)
    worth = (noise > 0.5).double() if scale == 0 else ((noise - 0.5) * (2 if mild else 4) * scale).round() / scale
    if dtype.is_floating_point and not differentiable and choices.often("-inf", 0.4):
        worth[choices.rand(*worth.shape) < 0.3] = -math.inf
    return TableReward(worth, dtype, reuses=not differentiable and choices.often("reuses", 0.3))


def draw_tilt(choices: Choices, reward: TableReward, differentiable: bool, listed: bool, mild: bool) -> ts.Tilt:
    pick = choices.pick
    estimators = [ts.Sampled(), ts.Sampled(), ts.Sampled(seed=3), ts.Value(value), *[ts.Exact()] * (3 * listed)]
    if differentiable:
        estimators += [ts.SoftInput(), ts.Relaxed(), ts.Relaxed(0.5, hard=True)]
    ramps = (*(ts.ramps.linear, ts.ramps.constant, ts.ramps.end, ts.ramps.clipped(5)) * 2, ts.ramps.exponential(3, 1.5))
    averages = ts.estimators.log_mean_exp, ts.estimators.log_mean_exp_outside, ts.estimators.mean
    tilt = ts.Tilt(
        reward,
        kl=pick("kl", 0.7, 1.0, 5.0) if mild else pick("kl", 0.05, 0.2, 0.7, 1.0, 5.0),
        ramp=pick("ramp", *ramps, ts.Adaptive(0.8), ts.Adaptive(0.5)),
        draws=pick("draws", 1, 2, 3),
        average=pick("average", averages[0], *averages),
        estimator=pick("estimator", *estimators),
        potential=pick("potential", *[ts.potentials.difference] * 3, ts.potentials.maximum, ts.potentials.total),
        differentiable=differentiable,
        # Particles at a low floor are rarely kept, and then have large weights: z-scores would need too many runs.
        floor=pick("floor", -2.0, -2.0, 0.0, -1.0 if mild else -10.0),
    )
    if choices.often("learned twist", 0.1):
        twist = ts.LearnedTwist(lambda x, t: 0.3 * t * value(x, t))
        tilt = twist.on(tilt) if pick("learned", "on", "beside") == "on" else twist.beside(tilt)
    return tilt


def draw_rule(choices: Choices, made: Made) -> rewards.Automaton:
    size, mask_id = made.model.vocab_size, made.model.kernel.mask_id
    words = [choices.random.choice([token for token in range(size) if token != mask_id]) for _ in range(2)]
    choices.made["words"] = words
    match choices.pick("rule", "contains", "avoids", "count"):
        case "contains":
            return rewards.contains(words[:1], size)
        case "avoids":
            return rewards.avoids([words], size)
    return rewards.count(words, size, at_least=1, at_most=2)


def draw_gradient(choices: Choices, base: ts.Proposal, tilt: ts.Tilt) -> ts.Gradient:
    pick = choices.pick
    return ts.Gradient(
        base,  # pyright: ignore[reportArgumentType]
        clip=pick("clip", None, 1.0, 5.0, 0.0),
        tokens_only=pick("tokens_only", False, False, True),
        scale=pick("gradient scale", 1.0, 1.0, 0.0, 0.5),
        every=pick("every", 1, 1, 2, 3),
        draws=pick("gradient draws", None, *[1, 2, 2] * tilt.drawn),
    )


def weighs(model: ts.Model) -> bool:
    """Whether its kernel can weigh moves that it did not draw, as mixtures and enumerations do."""
    return not isinstance(model.kernel, MaskGITExtended)


def draw_proposal(choices: Choices, made: Made, tilt: ts.Tilt | None, listed: bool) -> ts.Proposal:
    pick = choices.pick
    exact = tilt is None or (not tilt.estimator.random and tilt.potential.memoryless)
    kinds = ["FromModel", "FromModel", "Amortised", "Guided", "Optimal", *["OtherHead"] * (made.form == "hidden")]
    kinds += ["Enumerated"] * (3 * (listed and exact)) + ["Gradient"] * (4 * (tilt is not None))

    def single(kind: str, outermost: bool = False) -> ts.Proposal:
        match kind:
            case "Amortised":
                own_order = outermost and pick("own_order", False, False, True)
                return ts.Amortised(made.other, own_order, pick("scale", 1.0, 1.0, 0.5))
            case "OtherHead":
                return ts.OtherHead(made.nets[0].head(0.7), pick("change", None, torch.clone))
            case "Guided":
                return ts.Guided()
            case "Optimal":
                return ts.Optimal()
            case "Enumerated":
                return ts.Enumerated()
            case "Gradient":
                assert tilt is not None
                bases = ["FromModel", "FromModel", "Guided", "Amortised", "Optimal"]
                return draw_gradient(choices, single(pick("gradient base", *bases)), tilt)
        return ts.FromModel()

    chosen = pick("proposal", *kinds)
    if choices.often("mixture", 0.15) and weighs(made.model):
        members = [single(chosen), single(pick("second member", *kinds))]
        return ts.Mixture(members, pick("shares", (), (0.3, 0.7), (2.0, 1.0)))
    return single(chosen, outermost=True)


def draw_steering(choices: Choices, made: Made, mild: bool) -> Aim:
    model = made.model
    listed = weighs(model) and model.vocab_size ** made.canvas.shape[1] <= LISTED
    reward = tilt = None
    if choices.often("tilt", 0.88):
        differentiable = choices.often("differentiable", 0.4)
        reward = draw_reward(choices, made, differentiable, mild)
        tilt = draw_tilt(choices, reward, differentiable, listed, mild)
    proposal = draw_proposal(choices, made, tilt, listed)
    if model.kernel.mask_id != ts.NO_MASK and choices.often("constrain", 0.1):
        rule = draw_rule(choices, made)
        steering = rewards.constrain(model, rule, tilt, proposal)  # pyright: ignore[reportArgumentType]
        return Aim(steering, made, proposal, tilt, reward, rule)
    return Aim(ts.Steering(model, tilt, proposal), made, proposal, tilt, reward)
