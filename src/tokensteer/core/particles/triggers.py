"""Triggers: at which steps a population resamples.

A trigger takes the log-weights (B, N) and the step and returns a bool for each population, (B,).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from tokensteer.core.numerics.domains import check_number, check_whole
from tokensteer.core.particles.path import Step
from tokensteer.core.particles.resampling import ess

Trigger = Callable[[Tensor, Step], Tensor]


def always(log_w: Tensor, step: Step) -> Tensor:
    """At every step."""
    return torch.ones(log_w.shape[:-1], dtype=torch.bool, device=log_w.device)


def observe(log_w: Tensor, step: Step) -> Tensor:
    """Never, but look at the weights at every step, so that they are known there."""
    return torch.zeros(log_w.shape[:-1], dtype=torch.bool, device=log_w.device)


@dataclass(frozen=True)
class Scheduled:
    """A trigger that looks at the weights only at the steps `at`. Nobody needs them in between, so lazy twists are not
    evaluated there. Any other trigger is taken to look at every step."""

    trigger: Trigger
    at: Callable[[Step], bool]

    def __call__(self, log_w: Tensor, step: Step) -> Tensor:
        return (self.trigger if self.at(step) else observe)(log_w, step)


def looks(when: Trigger, step: Step) -> bool:
    """Whether a trigger may look at the weights before this step."""
    return when.at(step) if isinstance(when, Scheduled) else True


never = Scheduled(always, lambda step: False)


def every(k: int) -> Trigger:
    """After each k moves."""
    check_whole("every: k", k)
    return Scheduled(always, lambda step: step.index > 0 and step.index % k == 0)


def ess_below(fraction: float) -> Trigger:
    """Where the effective sample size has fallen below `fraction`·N."""
    check_number("ess_below: fraction", fraction, "(0, 1]")
    return lambda log_w, step: ess(log_w) < fraction * log_w.shape[-1]


def all_of(*triggers: Trigger) -> Trigger:
    """Where every one of the triggers fires."""
    return Scheduled(
        lambda log_w, step: reduce(torch.logical_and, (trigger(log_w, step) for trigger in triggers)),
        lambda step: all(looks(trigger, step) for trigger in triggers),
    )


def any_of(*triggers: Trigger) -> Trigger:
    """Where at least one of the triggers fires."""
    return Scheduled(
        lambda log_w, step: reduce(torch.logical_or, (trigger(log_w, step) for trigger in triggers)),
        lambda step: any(looks(trigger, step) for trigger in triggers),
    )
