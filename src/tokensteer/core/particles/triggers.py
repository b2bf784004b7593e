"""Triggers: functions of the log-weights (B, N) and the step that return whether each population resamples, (B,)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from tokensteer.core.numerics.domains import check_number, check_whole
from tokensteer.core.particles.path import Step
from tokensteer.core.particles.resampling import ess

Trigger = Callable[[Tensor, Step], Tensor]
"""(log-weights (B, N), the step) -> which populations are resampled, (B,)."""


def always(log_w: Tensor, step: Step) -> Tensor:
    """At every step."""
    return torch.ones(log_w.shape[:-1], dtype=torch.bool, device=log_w.device)


def observe(log_w: Tensor, step: Step) -> Tensor:
    """Never resample, but have the weights computed at every step."""
    return torch.zeros(log_w.shape[:-1], dtype=torch.bool, device=log_w.device)


@dataclass(frozen=True)
class Scheduled:
    """A trigger that reads weights only at the steps `at`, so twists need not be evaluated elsewhere. Any other trigger
    is assumed to read them at every step. `name` is that on the command line, if it has one."""

    trigger: Trigger
    at: Callable[[Step], bool]
    name: str = ""

    def __call__(self, log_w: Tensor, step: Step) -> Tensor:
        return (self.trigger if self.at(step) else observe)(log_w, step)


def looks(when: Trigger, step: Step) -> bool:
    """Whether a trigger may read the weights before this step."""
    return when.at(step) if isinstance(when, Scheduled) else True


never = Scheduled(always, lambda step: False, "never")
"""No resampling, and no look at the weights on the way."""


def every(k: int) -> Trigger:
    """After every k moves."""
    check_whole("every: k", k)
    return Scheduled(always, lambda step: step.index > 0 and step.index % k == 0, f"every:{k}")


def ess_below(fraction: float, looks: int | None = None) -> Trigger:
    """Where the effective sample size is below `fraction`·N. With `looks` = k it is checked at times (k-1)/k, ..., 1/k
    only, so that twists are evaluated only there."""
    check_number("ess_below: fraction", fraction, "(0, 1]")

    def below(log_w: Tensor, step: Step) -> Tensor:
        return ess(log_w) < fraction * log_w.shape[-1]

    name = f"ess:{fraction:g}"
    if looks is None:
        return Scheduled(below, lambda step: True, name)
    check_whole("ess_below: looks", looks, 2, "None looks at every step")

    def passed(t: float) -> int:
        return math.floor(t * looks + 1e-6)  # times are rounded: 0.3 may be a little less

    return Scheduled(below, lambda step: step.index > 0 and passed(step.t) > passed(step.s), f"{name}:{looks}")


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
