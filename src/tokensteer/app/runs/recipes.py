"""Methods by their names on the command line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from tokensteer.app.runs.answers import best, one_draw, unweighted, weighted
from tokensteer.app.words.lookup import choose
from tokensteer.core.models.denoiser import Denoiser
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.product import Product
from tokensteer.core.particles.resampling import multinomial
from tokensteer.core.particles.result import Result
from tokensteer.core.particles.triggers import ess_below, never
from tokensteer.core.proposals.enumerated import Enumerated
from tokensteer.core.proposals.proposal import Guided
from tokensteer.core.steering import methods
from tokensteer.core.steering.methods import Method
from tokensteer.core.steering.split_gibbs import SplitGibbs
from tokensteer.core.steering.steering import Steering
from tokensteer.core.twists.potentials import Potential, difference, maximum, total
from tokensteer.core.twists.tilt import Tilt
from tokensteer.tasks.common.learned import with_twist
from tokensteer.tasks.common.task import Task, Trained

STAGES = 5
"""How often FK steering resamples in a run."""


@dataclass(frozen=True)
class Recipe:
    """How a method is made for a task and a number of particles, and how its answer is read off the result.

    With `sweeps`, that many sweeps of particle Gibbs follow the first run; with `split`, split Gibbs is run instead.
    `trained` finds the networks that were trained for it. Unless it `estimates` the normaliser, its log Z is not
    reported. If `planned`, pilots choose what it is made of; if it `guides`, it has a scale of guidance, and if it
    `clips`, a gradient with a bound, or several for pilots to choose from. Unless it `shares`, its draws have fresh
    noise even where the task shares noise: methods that accumulate estimates along the path need their noise to average
    out.
    """

    make: Callable[[Task, Tilt, int], Method]
    answer: Callable[[Result], Result] = weighted
    sweeps: int = 0
    split: SplitGibbs | None = None
    trained: Callable[[Task], Trained] | None = None
    estimates: bool = True
    shares: bool = True
    planned: bool = False
    guides: bool = False
    clips: bool = False


def _twisted(task: Task, tilt: Tilt) -> Tilt:
    """The tilt with the task's learned twist. Raises ValueError if it was learned for another reward, kl or ramp."""
    trained = learned(task)
    twisted = with_twist(tilt, trained)
    if trained.value is not None and trained.value.config.beside and tilt.ramp is not task.tilt.ramp:
        raise ValueError(f"the twist of {task.name} was learned beside the task's own ramp: leave out --ramp")
    card = trained.value_card or trained.card
    if (other := other_reward(task, card)) is not None:
        raise ValueError(
            f"the twist of {task.name} was learned for {other}, and here it is {named(task.reward)}: use smc-amot"
        )
    if (kl := card["kl"]) != tilt.kl:
        raise ValueError(
            f"the twist of {task.name} was learned at kl = {kl:g}, and here it is {tilt.kl:g}: give --kl {kl:g}, or "
            "use smc-amot"
        )
    return twisted


def other_reward(task: Task, card: Mapping[str, Any]) -> str | None:
    """The reward that networks with this card were learned for, in words; None if it is that of the task."""
    return None if card.get("reward") == task.reward else named(card.get("reward"))


def named(reward: str | None) -> str:
    return "the task's own reward" if reward is None else f"the reward {reward}"


def usual_clip(task: Task, tilt: Tilt, most: float = methods.CLIP) -> float | None:
    """Gradients of estimates from a few draws are steep and clipped, at the task's clip or else at `most`; those in
    closed form are not."""
    own = most if task.clip is None else task.clip
    return own if tilt.drawn else None


class NeverTrainedError(ValueError):
    """A method needs networks that a task does not have for any goal."""


def learned(task: Task) -> Trained:
    """The networks that were trained for the task and its goal."""
    if task.learned is None:
        raise NeverTrainedError(
            f"nothing was trained for {task.name}: choose a method without amot or learned in its name"
        )
    return task.learned()


def _guided(task: Task, tilt: Tilt) -> Method:
    if task.guided is None:
        raise ValueError(
            f"the target of {task.name} is no product of models: cfg and smc-cfg need one, as dna has in a model that "
            "takes the goal as a label"
        )
    return Method(Steering(task.guided(), tilt if task.tilts_guided else None, Guided()))


def _without_weights(method: Method) -> Method:
    """The usual sampler: a correction of weights would predict each step twice."""
    model = method.steering.model
    if isinstance(model, Product):
        method = replace(method, steering=replace(method.steering, model=replace(model, correct_remasking=False)))
    return replace(method, when=never)


def _uniform(task: Task) -> Diffusion:
    if task.uniform is None:
        raise ValueError(f"{task.name} has no model of uniform noise: sgdd needs one, as dna has")
    return task.uniform()


def _drakes(name: str) -> Recipe:
    def tuned(task: Task) -> Trained:
        if task.tuned is None:
            raise NeverTrainedError(f"no denoiser was tuned for {task.name}: {name} needs one, as dna has")
        return task.tuned(name)

    def make(task: Task, tilt: Tilt, n: int) -> Method:
        return methods.pretrained(replace(task.model, denoiser=cast("Denoiser", tuned(task).q)))

    return Recipe(make, unweighted, trained=tuned)


def _split_gibbs(split: SplitGibbs) -> Recipe:
    def make(task: Task, tilt: Tilt, n: int) -> Method:
        return Method(Steering(_uniform(task), tilt))

    return Recipe(make, unweighted, split=split, estimates=False)


def _fk(potential: Potential) -> Callable[[Task, Tilt, int], Method]:
    return lambda task, tilt, n: methods.fk_steering(
        task.model, tilt, potential, max(1, len(task.model.steps) // STAGES)
    )


METHODS: dict[str, Recipe] = {
    # What pilots choose within --budget.
    "auto": Recipe(lambda task, tilt, n: methods.smc_base(task.model, tilt), planned=True, clips=True),
    # The model alone, unsteered.
    "pretrained": Recipe(lambda task, tilt, n: methods.pretrained(task.model), unweighted),
    # Independent samples, weighted at the end.
    "best-of-n": Recipe(lambda task, tilt, n: methods.best_of_n(task.model, tilt)),
    # One survivor in every step: drawn by weight, or the best; or SVDD in groups of up to four, with SMC between them.
    "svdd": Recipe(lambda task, tilt, n: methods.svdd(task.model, tilt), one_draw),
    "svdd-argmax": Recipe(lambda task, tilt, n: methods.greedy_svdd(task.model, tilt), best, estimates=False),
    "nested-svdd": Recipe(lambda task, tilt, n: methods.nested_svdd(task.model, tilt, math.gcd(n, 4))),
    # Feynman-Kac steering by differences of rewards, by the highest reward so far, and by the sum of rewards.
    "fk-difference": Recipe(_fk(difference)),
    "fk-max": Recipe(_fk(maximum), shares=False),
    "fk-sum": Recipe(_fk(total), shares=False),
    # The gradient proposal without its weights: classifier guidance.
    "prop-grad": Recipe(
        lambda task, tilt, n: methods.prop_grad(task.model, tilt, usual_clip(task, tilt, 3.0)), unweighted, clips=True
    ),
    # Classifier-free guidance without its weights, and with the weights that make it exact.
    "cfg": Recipe(lambda task, tilt, n: _without_weights(_guided(task, tilt)), unweighted, guides=True),
    "smc-cfg": Recipe(lambda task, tilt, n: _guided(task, tilt), guides=True),
    # The model tuned by the gradient of the reward, and the same with a KL penalty that keeps it near the model.
    "drakes": _drakes("drakes"),
    "drakes-kl": _drakes("drakes-kl"),
    # Split Gibbs sampling with uniform noise: with the denoiser rows of plain sampling, and as long as its authors'.
    "sgdd": _split_gibbs(SplitGibbs()),
    "sgdd-long": _split_gibbs(SplitGibbs(50, steps=32, flips=200)),
    # SMC with the model as proposal, the gradient proposal, and the locally optimal one by enumeration (few states).
    "smc-base": Recipe(lambda task, tilt, n: methods.smc_base(task.model, tilt)),
    "smc-grad": Recipe(lambda task, tilt, n: methods.smc_grad(task.model, tilt, usual_clip(task, tilt)), clips=True),
    "smc-enumerated": Recipe(lambda task, tilt, n: Method(Steering(task.model, tilt, Enumerated()))),
    # The learned proposal without its weights, with them, and with the learned twist too.
    "prop-amot": Recipe(
        lambda task, tilt, n: methods.prop_amot(task.model, tilt, learned(task).proposal), unweighted, trained=learned
    ),
    "smc-amot": Recipe(
        lambda task, tilt, n: methods.smc_amot(task.model, tilt, learned(task).proposal), trained=learned
    ),
    "smc-learned": Recipe(
        lambda task, tilt, n: methods.smc_amot(task.model, _twisted(task, tilt), learned(task).proposal),
        trained=lambda task: learned(task).taught,
    ),
    # SMC refined by three sweeps of particle Gibbs.
    "particle-gibbs": Recipe(
        lambda task, tilt, n: Method(Steering(task.model, tilt), multinomial, ess_below(0.5)), sweeps=3
    ),
}


def usual(task: Task, tilt: Tilt) -> list[str]:
    """The methods to compare by default: the enumerated proposal only where twists need no draws, and others only where
    the task has what they need, such as networks trained for this goal."""
    left_out = {"auto", "particle-gibbs", "sgdd-long", "svdd-argmax", *_hindered(task, tilt)}
    if tilt.drawn:
        left_out.add("smc-enumerated")
    if task.guided is None:
        left_out |= {"cfg", "smc-cfg"}
    if task.uniform is None:
        left_out.add("sgdd")
    return [name for name in METHODS if name not in left_out]


def lacking(task: Task, tilt: Tilt) -> dict[str, str]:
    """The methods whose networks the task has for other goals or targets, each with the mend."""
    found = _hindered(task, tilt).items()
    return {name: str(error) for name, error in found if not isinstance(error, NeverTrainedError)}


def _hindered(task: Task, tilt: Tilt) -> dict[str, Exception]:
    """The methods that lack trained networks, with their errors."""
    found: dict[str, Exception] = {}
    for name, recipe in METHODS.items():
        try:
            if recipe.trained is not None:
                recipe.make(task, tilt, 1)
        except (FileNotFoundError, ValueError) as error:
            found[name] = error
    return found


def recipe_of(name: str) -> Recipe:
    return choose(name, METHODS, "method")
