"""Methods by the names that the command line knows them by."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from tokensteer.app.runs.answers import best, one_draw, unweighted, weighted
from tokensteer.app.words.lookup import choose
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.particles.resampling import multinomial
from tokensteer.core.particles.result import Result
from tokensteer.core.particles.triggers import ess_below, never
from tokensteer.core.proposals.enumerated import Enumerated
from tokensteer.core.steering.methods import (
    Method,
    best_of_n,
    cfg,
    fk_steering,
    greedy_svdd,
    nested_svdd,
    pretrained,
    prop_amot,
    prop_grad,
    smc_amot,
    smc_base,
    smc_grad,
    svdd,
)
from tokensteer.core.steering.split_gibbs import SplitGibbs
from tokensteer.core.steering.steering import Steering
from tokensteer.core.twists.potentials import Potential, difference, maximum, total
from tokensteer.core.twists.tilt import Tilt
from tokensteer.tasks.common.learned import with_twist
from tokensteer.tasks.common.task import Task, Trained

STAGES = 5
"""How often FK steering resamples in a run."""
GUIDANCE = 1.5
"""The scale of classifier-free guidance."""


@dataclass(frozen=True)
class Recipe:
    """How a method is put together for a number of particles, and how its answer is read off.

    With `sweeps`, that many sweeps of particle Gibbs follow a first run; with `split`, split Gibbs is run instead. What
    was trained for it is found by `trained`. Unless it `estimates` the normaliser, its weights mean nothing. Unless it
    `shares`, the noise of its draws is fresh even where the task's is shared: estimates that are gathered along the
    way want their noise to average out.
    """

    about: str
    make: Callable[[Task, Tilt, int], Method]
    answer: Callable[[Result], Result] = weighted
    sweeps: int = 0
    split: SplitGibbs | None = None
    trained: Callable[[Task], Trained] | None = None
    estimates: bool = True
    shares: bool = True


def _twisted(task: Task, tilt: Tilt) -> Tilt:
    """The tilt with the task's learned twist, or the error that they do not go together."""
    trained = learned(task)
    twisted = with_twist(tilt, trained)
    if trained.value is not None and trained.value.config.beside and tilt.ramp is not task.tilt.ramp:
        raise ValueError(f"the twist of {task.name} was learned beside the task's own ramp: leave out --ramp")
    if (kl := (trained.value_card or trained.card)["kl"]) != tilt.kl:
        raise ValueError(
            f"the twist of {task.name} was learned at kl = {kl:g}, and here it is {tilt.kl:g}: give --kl {kl:g}, or "
            "use smc-amot"
        )
    return twisted


def _clip(tilt: Tilt) -> float | None:
    """Estimates from few draws have steep gradients, which are clipped; those in closed form can be trusted."""
    return 3.0 if tilt.drawn else None


class NeverTrainedError(ValueError):
    """A method needs networks of a kind that a task does not have, whatever its goal."""


def learned(task: Task) -> Trained:
    """What was trained for the task and its goal."""
    if task.learned is None:
        raise NeverTrainedError(
            f"nothing was trained for {task.name}: choose a method without amot or learned in its name"
        )
    return task.learned()


def _conditional(task: Task) -> Diffusion:
    if task.conditional is None:
        raise ValueError(f"{task.name} has no model that is told the goal: cfg and smc-cfg need one, as dna has")
    return task.conditional()


def _guided(task: Task) -> Method:
    return cfg(_conditional(task), task.model, GUIDANCE)


def _uniform(task: Task) -> Diffusion:
    if task.uniform is None:
        raise ValueError(f"{task.name} has no model of uniform noise: sgdd needs one, as dna has")
    return task.uniform()


def _tuned(name: str) -> Callable[[Task], Trained]:
    def find(task: Task) -> Trained:
        if task.tuned is None:
            raise NeverTrainedError(f"no denoiser was tuned for {task.name}: {name} needs one, as dna has")
        return task.tuned(name)

    return find


def _drakes(name: str, about: str) -> Recipe:
    return Recipe(
        about,
        lambda task, tilt, n: pretrained(replace(task.model, denoiser=_tuned(name)(task).denoiser)),
        unweighted,
        trained=_tuned(name),
    )


def _fk(potential: Potential) -> Callable[[Task, Tilt, int], Method]:
    return lambda task, tilt, n: fk_steering(task.model, tilt, potential, max(1, len(task.model.steps) // STAGES))


METHODS: dict[str, Recipe] = {
    "pretrained": Recipe("the model alone, unsteered", lambda task, tilt, n: pretrained(task.model), unweighted),
    "best-of-n": Recipe("independent samples, weighed at the end", lambda task, tilt, n: best_of_n(task.model, tilt)),
    "svdd": Recipe("one survivor in every step", lambda task, tilt, n: svdd(task.model, tilt), one_draw),
    "svdd-argmax": Recipe(
        "the best survives in every step",
        lambda task, tilt, n: greedy_svdd(task.model, tilt),
        best,
        estimates=False,
    ),
    "nested-svdd": Recipe(
        "SVDD in groups of up to four, SMC between them",
        lambda task, tilt, n: nested_svdd(task.model, tilt, math.gcd(n, 4)),
    ),
    "fk-difference": Recipe("Feynman-Kac steering by differences of rewards", _fk(difference)),
    "fk-max": Recipe("Feynman-Kac steering by the highest reward so far", _fk(maximum), shares=False),
    "fk-sum": Recipe("Feynman-Kac steering by the sum of rewards", _fk(total), shares=False),
    "prop-grad": Recipe(
        "the gradient proposal without its weights: classifier guidance",
        lambda task, tilt, n: prop_grad(task.model, tilt, _clip(tilt)),
        unweighted,
    ),
    "cfg": Recipe(
        "classifier-free guidance without its weights",
        lambda task, tilt, n: replace(_guided(task), when=never),
        unweighted,
    ),
    "smc-cfg": Recipe(
        "classifier-free guidance with the weights that make it exact", lambda task, tilt, n: _guided(task)
    ),
    "drakes": _drakes("drakes", "the model tuned by the gradient of the reward"),
    "drakes-kl": _drakes("drakes-kl", "the model tuned by the gradient of the reward, held near itself"),
    "sgdd": Recipe(
        "split Gibbs sampling with uniform noise",
        lambda task, tilt, n: Method(Steering(_uniform(task), tilt)),
        unweighted,
        split=SplitGibbs(),
        estimates=False,
    ),
    "smc-base": Recipe("SMC with the model as proposal", lambda task, tilt, n: smc_base(task.model, tilt)),
    "smc-grad": Recipe("SMC with the gradient proposal", lambda task, tilt, n: smc_grad(task.model, tilt, _clip(tilt))),
    "smc-enumerated": Recipe(
        "SMC with the locally optimal proposal, by enumeration: for few states",
        lambda task, tilt, n: Method(Steering(task.model, tilt, Enumerated())),
    ),
    "prop-amot": Recipe(
        "the learned proposal without its weights",
        lambda task, tilt, n: prop_amot(task.model, tilt, learned(task).denoiser),
        unweighted,
        trained=learned,
    ),
    "smc-amot": Recipe(
        "SMC with the learned proposal",
        lambda task, tilt, n: smc_amot(task.model, tilt, learned(task).denoiser),
        trained=learned,
    ),
    "smc-learned": Recipe(
        "SMC with the learned proposal and the learned twist",
        lambda task, tilt, n: smc_amot(task.model, _twisted(task, tilt), learned(task).denoiser),
        trained=lambda task: learned(task).taught,
    ),
    "particle-gibbs": Recipe(
        "SMC refined by three sweeps of particle Gibbs",
        lambda task, tilt, n: Method(Steering(task.model, tilt), multinomial, ess_below(0.5)),
        sweeps=3,
    ),
}


def usual(task: Task, tilt: Tilt) -> list[str]:
    """The methods worth comparing: the enumerated proposal only where twists need no draws, and others where there is
    what they need, such as networks that were trained for this goal."""
    left_out = {"particle-gibbs", "svdd-argmax"}
    if tilt.drawn:
        left_out.add("smc-enumerated")
    if task.conditional is None:
        left_out |= {"cfg", "smc-cfg"}
    if task.uniform is None:
        left_out.add("sgdd")
    left_out |= set(_hindered(task, tilt))
    return [name for name in METHODS if name not in left_out]


def lacking(task: Task, tilt: Tilt) -> dict[str, str]:
    """The methods whose networks the task might have and lacks for this goal and target, and the mend of each."""
    return {
        name: str(error) for name, error in _hindered(task, tilt).items() if not isinstance(error, NeverTrainedError)
    }


def _hindered(task: Task, tilt: Tilt) -> dict[str, Exception]:
    """The methods that cannot be had for want of networks, with what they say."""
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
