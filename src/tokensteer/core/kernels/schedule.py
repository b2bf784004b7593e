"""Noise schedules and time grids.

Time runs from t = 1 (all noise) down to t = 0 (clean data). A schedule is alpha(t), the probability that a token
survives to time t, and its derivative; a grid divides [0, 1] into steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tokensteer.core.numerics.domains import check_number, check_whole
from tokensteer.core.particles.path import Step


class Schedule(Protocol):
    """alpha(t) falls from (about) 1 at t = 0 to (about) 0 at t = 1; `derivative` is d alpha / dt."""

    def alpha(self, t: float) -> float: ...
    def derivative(self, t: float) -> float: ...


def alphas(schedule: Schedule, step: Step) -> tuple[float, float]:
    """alpha_t and alpha_s. At s = 0 alpha_s is 1 whatever the schedule is, so that no site stays masked."""
    return schedule.alpha(step.t), 1.0 if step.s == 0 else schedule.alpha(step.s)


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
    """t = cos(pi/2 · done): small steps at first, large ones at the end."""
    return _grid(num_steps, lambda done: math.cos(math.pi / 2 * done))


@dataclass(frozen=True)
class LoopSchedule:
    """alpha of ReMDM-loop: rises to `alpha_on` at t = t_on, is constant down to t_off, then rises to 1."""

    t_on: float
    t_off: float
    alpha_on: float

    def __post_init__(self) -> None:
        if not 0 < self.t_off < self.t_on < 1 or not 0 < self.alpha_on < 1:
            raise ValueError(
                f"LoopSchedule needs 0 < t_off < t_on < 1 and 0 < alpha_on < 1, got t_off = {self.t_off}, "
                f"t_on = {self.t_on}, alpha_on = {self.alpha_on}"
            )

    def alpha(self, t: float) -> float:
        if t > self.t_on:
            return self.alpha_on * (1.0 - t) / (1.0 - self.t_on)
        return self.alpha_on if t >= self.t_off else 1.0 - (1.0 - self.alpha_on) * t / self.t_off

    def derivative(self, t: float) -> float:
        if t > self.t_on:
            return -self.alpha_on / (1.0 - self.t_on)
        return 0.0 if t >= self.t_off else -(1.0 - self.alpha_on) / self.t_off
