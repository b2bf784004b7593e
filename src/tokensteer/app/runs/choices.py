"""Ramps, triggers, resampling schemes and noises by name, some with a number after a colon."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tokensteer.app.words.lookup import choose, unknown
from tokensteer.app.words.settings import RARELY
from tokensteer.core.particles import resampling
from tokensteer.core.particles.path import Step
from tokensteer.core.particles.resampling import Resampler
from tokensteer.core.particles.triggers import Scheduled, Trigger, always, ess_below, every, never, observe
from tokensteer.core.steering.methods import Method
from tokensteer.core.twists import ramps
from tokensteer.core.twists.estimators import Sampled
from tokensteer.core.twists.ramps import Adaptive, Ramp
from tokensteer.core.twists.tilt import Tilt
from tokensteer.tasks.common.settings import Settings
from tokensteer.tasks.common.task import Task

RAMPS: dict[str, Ramp] = {
    "linear": ramps.linear,
    "constant": ramps.constant,
    "end": ramps.end,
    "exponential": ramps.exponential(100),
}
TRIGGERS: dict[str, Trigger] = {"always": always, "never": never, "observe": observe}
SCHEMES: dict[str, Resampler] = {
    "systematic": resampling.systematic,
    "stratified": resampling.stratified,
    "residual": resampling.residual,
    "multinomial": resampling.multinomial,
    "ssp": resampling.ssp,
}
"""Those that keep all targets."""
SURVIVORS: dict[str, Resampler] = {"one survivor": resampling.one_survivor, "the heaviest": resampling.heaviest}
"""Those of SVDD, which cannot be asked for by name."""
OWN = "the method's own"
"""What has no name on the command line."""
NOISES = ("fresh", "shared")


def ramp(text: str) -> Ramp | Adaptive:
    """linear, constant, end, exponential, clipped:k (full after k tenths of the time) or adaptive:share."""
    name, number = _parts(text, "ramp", ("clipped", "adaptive"))
    if number is None:
        if text not in RAMPS:
            raise ValueError(unknown(text, [*RAMPS, "clipped:3", "adaptive:0.9"], "ramp"))
        return RAMPS[text]
    if number <= 0:
        raise ValueError(f"--ramp {name}: takes a positive number, got {number:g}")
    if name == "clipped" and number > 10:
        raise ValueError(f"--ramp clipped:k takes tenths of the time, above 0 and up to 10, got {number:g}")
    return ramps.clipped(number) if name == "clipped" else Adaptive(number)


def trigger(text: str) -> Trigger:
    """always, never, observe (never, but compute the weights), ess:share, ess:share:looks or every:k."""
    looks = None
    if text.startswith("ess:") and text.count(":") == 2:
        text, _, last = text.rpartition(":")
        if not last.isdecimal() or int(last) < 2:
            raise ValueError(f"--trigger ess:share:looks takes a number of looks from 2, got {last!r}; try ess:0.5:10")
        looks = int(last)
    name, number = _parts(text, "trigger", ("ess", "every"))
    if number is None:
        if text not in TRIGGERS:
            raise ValueError(unknown(text, ["ess:0.5", "ess:0.5:10", "every:20", *TRIGGERS], "trigger"))
        return TRIGGERS[text]
    if name == "every" and number != int(number):
        raise ValueError(f"--trigger every:k takes a whole number of steps, got {number:g}; try every:20")
    return every(int(number)) if name == "every" else ess_below(number, looks)


def resampler(text: str) -> Resampler:
    return choose(text, SCHEMES, "resampling scheme")


def ramp_name(used: Ramp | Adaptive, steps: Sequence[Step] = ()) -> str:
    """The name of a ramp, found by its values, those at the steps of a run among them."""
    if isinstance(used, Adaptive):
        return f"adaptive:{used.share:g}"
    known = {**RAMPS, **{f"clipped:{k}": ramps.clipped(k) for k in range(1, 10)}}
    times = [*(k / 100 for k in range(100)), *(step.t for step in steps)]
    rarely = RARELY if all(used(t) in (0.0, 1.0) for t in times) else OWN
    return next((name for name, other in known.items() if all(other(t) == used(t) for t in times)), rarely)


def trigger_name(used: Trigger) -> str:
    if isinstance(used, Scheduled):
        return used.name or OWN
    return next((name for name, other in TRIGGERS.items() if other is used), OWN)


def scheme_name(used: Resampler) -> str:
    return next((name for name, other in (SCHEMES | SURVIVORS).items() if other is used), OWN)


def has_scheme(method: Method) -> bool:
    """Whether a method resamples by one of the schemes, so that another may take its place."""
    return method.resample in SCHEMES.values() and method.when is not never


def _parts(text: str, option: str, numbered: tuple[str, ...]) -> tuple[str, float | None]:
    """name:number taken apart, if it is one of the `numbered` names; otherwise the text and None."""
    name, _, value = text.partition(":")
    if not value or name not in numbered:
        return text, None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"--{option} {name}: takes a number after the colon, got {value!r}")
    return name, number


def tilted(task: Task, settings: Settings, seed: int = 0, shares: bool = True) -> Tilt:
    """The task's tilt with the ramp, smoothing, number of draws and noise of the settings.

    Shared noise has the seed of the run. Without --noise, a method that `shares` uses shared noise where the task
    does. With --draws the reward is estimated from draws even where the task has it in closed form.
    """
    noise, tilt = settings.noise, task.tilt
    if settings.ramp is not None:
        tilt = replace(tilt, ramp=ramp(settings.ramp))
    if settings.smoothing is not None:
        tilt = replace(tilt, smoothing=settings.smoothing)
    if settings.draws is not None:
        tilt = replace(tilt, draws=settings.draws, estimator=tilt.estimator if tilt.drawn else Sampled())
    if noise not in (None, *NOISES):
        raise ValueError(unknown(noise, NOISES, "noise"))
    if isinstance(tilt.estimator, Sampled):
        shared = noise == "shared" or (noise is None and shares and not tilt.estimator.random)
        return replace(tilt, estimator=Sampled(seed if shared else None))
    if noise is not None:
        raise ValueError(f"--noise is that of draws, and {task.name} needs none on the way: give --draws too")
    return tilt
