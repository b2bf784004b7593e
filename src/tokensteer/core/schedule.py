"""Schedules of noise, grids of time, ramps of reward.

Time runs from t = 1 (all noise) down to t = 0 (clean data). A schedule gives alpha(t), the probability that a token
survives to time t, and its derivative; a grid cuts [0, 1] into steps; a ramp says how much of the reward counts at t.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tokensteer.core.domains import check_number, check_whole

Ramp = Callable[[float], float]


@dataclass(frozen=True)
class Step:
    """The move from time t to time s < t; `index` counts moves from 0."""

    index: int
    t: float
    s: float

    def __post_init__(self) -> None:
        check_whole("Step.index", self.index, 0)
        check_number("Step.t", self.t, "[0, inf)")
        check_number("Step.s", self.s, "[0, inf)")


class Schedule(Protocol):
    """alpha(t) falls from (about) 1 at t = 0 to (about) 0 at t = 1; `derivative` is d alpha / dt."""

    def alpha(self, t: float) -> float: ...
    def derivative(self, t: float) -> float: ...


@dataclass(frozen=True)
class Linear:
    """alpha = 1 - t."""

    def alpha(self, t: float) -> float:
        return 1.0 - t

    def derivative(self, t: float) -> float:
        return -1.0


@dataclass(frozen=True)
class Cosine:
    """alpha = 1 - cos(pi/2 · (1 - t))."""

    def alpha(self, t: float) -> float:
        return 1.0 - math.cos(math.pi / 2 * (1.0 - t))

    def derivative(self, t: float) -> float:
        return -math.pi / 2 * math.sin(math.pi / 2 * (1.0 - t))


@dataclass(frozen=True)
class LogLinear:
    """alpha = 1 - (1 - eps)·t, that is exp(-sigma) with sigma = -log(1 - (1 - eps)·t)."""

    eps: float = 1e-3

    def __post_init__(self) -> None:
        check_number("LogLinear.eps", self.eps, "[0, 1)")

    def alpha(self, t: float) -> float:
        return 1.0 - (1.0 - self.eps) * t

    def derivative(self, t: float) -> float:
        return -(1.0 - self.eps)


@dataclass(frozen=True)
class Geometric:
    """alpha = exp(-low^(1 - t) · high^t)."""

    low: float = 1e-5
    high: float = 20.0

    def __post_init__(self) -> None:
        check_number("Geometric.low", self.low, "(0, inf)")
        check_number("Geometric.high", self.high, f"({self.low}, inf)")

    def alpha(self, t: float) -> float:
        return math.exp(-(self.low ** (1.0 - t)) * self.high**t)

    def derivative(self, t: float) -> float:
        return -self.alpha(t) * self.low ** (1.0 - t) * self.high**t * math.log(self.high / self.low)


@dataclass(frozen=True)
class Polynomial:
    """alpha = 1 - t^power."""

    power: float = 2.0

    def __post_init__(self) -> None:
        check_number("Polynomial.power", self.power, "(0, inf)")

    def alpha(self, t: float) -> float:
        return 1.0 - t**self.power

    def derivative(self, t: float) -> float:
        return -self.power * t ** (self.power - 1.0)


def _grid(num_steps: int, time: Callable[[float], float]) -> tuple[Step, ...]:
    check_whole("num_steps", num_steps)
    times = [1.0, *(time(i / num_steps) for i in range(1, num_steps)), 0.0]
    return tuple(Step(i, times[i], times[i + 1]) for i in range(num_steps))


def uniform_steps(num_steps: int) -> tuple[Step, ...]:
    """Equal steps from 1 down to 0."""
    return _grid(num_steps, lambda done: 1.0 - done)


def cosine_steps(num_steps: int) -> tuple[Step, ...]:
    """t = cos(pi/2 · done): small steps at first, when all is still open, and large ones at the end."""
    return _grid(num_steps, lambda done: math.cos(math.pi / 2 * done))


def linear_ramp(t: float) -> float:
    """lambda = 1 - t."""
    return 1.0 - t


def constant_ramp(t: float) -> float:
    """lambda = 1: the reward counts in full from the start."""
    return 1.0


def end_ramp(t: float) -> float:
    """lambda = 0 until the end: only finished samples are judged."""
    return 1.0 if t == 0 else 0.0


def exponential_ramp(num_steps: int, base: float = 1.05) -> Ramp:
    """lambda = min(base^i - 1, 1) after i of `num_steps` equal steps."""
    check_whole("exponential_ramp: num_steps", num_steps)
    check_number("exponential_ramp: base", base, "(1, inf)")
    return lambda t: min(base ** ((1.0 - t) * num_steps) - 1.0, 1.0)


def clipped_ramp(k: float) -> Ramp:
    """lambda = min(1, (10/k)·(1 - t)): the full reward is reached after a fraction k/10 of the time."""
    check_number("clipped_ramp: k", k, "(0, 10]", "10 reaches the full reward at the end")
    return lambda t: min(1.0, 10.0 / k * (1.0 - t))
