"""Ramps, triggers and noises by name, with a number after a colon where they have one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from tokensteer.app.words.lookup import unknown
from tokensteer.core.particles.triggers import Trigger, always, ess_below, every, never, observe
from tokensteer.core.twists import ramps
from tokensteer.core.twists.estimators import Sampled
from tokensteer.core.twists.ramps import Adaptive, Ramp
from tokensteer.core.twists.tilt import Tilt
from tokensteer.tasks.common.settings import Settings
from tokensteer.tasks.common.task import Task


def _argument(text: str, name: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name}: takes a number after the colon, got {text!r}")
    return number


def _every(number: float) -> Trigger:
    if number != int(number):
        raise ValueError(f"--trigger every:k takes a whole number of steps, got {number:g}; try every:20")
    return every(int(number))


RAMPS: dict[str, Ramp] = {
    "linear": ramps.linear,
    "constant": ramps.constant,
    "end": ramps.end,
    "exponential": ramps.exponential(100),
}
_RAMPS_OF: dict[str, Callable[[float], Ramp | Adaptive]] = {"clipped": ramps.clipped, "adaptive": Adaptive}

TRIGGERS: dict[str, Trigger] = {"always": always, "never": never, "observe": observe}
_TRIGGERS_OF: dict[str, Callable[[float], Trigger]] = {"ess": ess_below, "every": _every}


def ramp(text: str) -> Ramp | Adaptive:
    """linear, constant, end, exponential, clipped:k (full after k tenths of the time) or adaptive:share."""
    name, _, value = text.partition(":")
    if value and name in _RAMPS_OF:
        number = _argument(value, f"--ramp {name}")
        if number <= 0:
            raise ValueError(f"--ramp {name}: takes a positive number, got {value}")
        if name == "clipped" and number > 10:
            raise ValueError(f"--ramp clipped:k takes tenths of the time, above 0 and up to 10, got {value}")
        return _RAMPS_OF[name](number)
    if text not in RAMPS:
        raise ValueError(unknown(text, [*RAMPS, "clipped:3", "adaptive:0.9"], "ramp"))
    return RAMPS[text]


def trigger(text: str) -> Trigger:
    """always, never, observe (never, but look), ess:share or every:k."""
    name, _, value = text.partition(":")
    if value and name in _TRIGGERS_OF:
        return _TRIGGERS_OF[name](_argument(value, f"--trigger {name}"))
    if text not in TRIGGERS:
        raise ValueError(unknown(text, ["ess:0.5", "every:20", *TRIGGERS], "trigger"))
    return TRIGGERS[text]


NOISES = ("fresh", "shared")


def tilted(task: Task, settings: Settings, seed: int = 0, shares: bool = True) -> Tilt:
    """The task's tilt with another ramp, number of draws or noise behind them. Shared noise is that of the run's seed;
    where the task shares it, so does a method that `shares`, unless told otherwise. Who asks for draws wants the reward
    estimated from them, even where the task knows it in closed form."""
    noise, tilt = settings.noise, task.tilt
    if settings.ramp is not None:
        tilt = replace(tilt, ramp=ramp(settings.ramp))
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
