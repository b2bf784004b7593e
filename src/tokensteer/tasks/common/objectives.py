"""Objectives of proposals and twists, and baselines, by their names on the command line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from tokensteer.core.particles.path import Step
from tokensteer.tasks.nets import ValueConfig, ValueNet
from tokensteer.train import (
    Balance,
    Contrastive,
    Likelihood,
    Objective,
    OfTime,
    PathVariance,
    PerStep,
    Returns,
    StepVariance,
)
from tokensteer.train.accepted import Accepted

Aim = Objective | Likelihood | Accepted

OBJECTIVES: Mapping[str, Objective | Likelihood] = {
    "step-variance": StepVariance(),
    "balance": Balance(0.9, ends=0.5),
    "detailed-balance": Balance(0.0),
    "trajectory-balance": Balance(math.inf),
    "path-variance": PathVariance(),
    "likelihood": Likelihood(),
}
RETURNS = "returns"
TWISTS: Mapping[str, type[Returns] | type[Contrastive]] = {RETURNS: Returns, "contrastive": Contrastive}
"""Objectives of a twist for a finished proposal. Each is made with `twists`: whether the twist is added to the tilt's
estimates."""
NO_BASELINE = (PathVariance, Likelihood, Accepted)
STATE, NONE = "state", "none"
BASELINES: Mapping[str, Callable[[ValueConfig, Sequence[Step]], nn.Module]] = {
    # F(x_t, t), the task's own network of the state
    STATE: lambda value, steps: ValueNet(value),
    # F(t), a network of the time, as in the paper
    "time": lambda value, steps: OfTime(),
    # F(t), a number for each step
    "per-step": lambda value, steps: PerStep(steps),
}


def check_kind(objective: str | None, twist: bool) -> None:
    """Raise if an objective by name trains a proposal where a `twist` is trained, or the other way round."""
    own, others = (TWISTS, OBJECTIVES) if twist else (OBJECTIVES, TWISTS)
    if objective in others:
        here, there = ("twist", "proposal") if twist else ("proposal", "twist")
        raise ValueError(
            f"the objective {objective} is that of a {there}: give --{there} instead of --{here}, or one of "
            f"{', '.join(own)} as --objective"
        )


def check_pair(objective: Aim, baseline: str | None) -> None:
    """Raise if an objective cannot use the baseline that was chosen for it."""
    if isinstance(objective, Balance) and baseline not in (None, STATE):
        raise ValueError(
            f"balance learns F(x_t, t) as the log-twist, and the baseline {baseline} does not read x_t: leave out "
            "--baseline, or give --objective step-variance"
        )
    if isinstance(objective, NO_BASELINE) and baseline is not None:
        raise ValueError(
            f"{type(objective).__name__} has no baseline: leave out --baseline {baseline}, or give --objective "
            "step-variance"
        )


def make_baseline(name: str, value: ValueConfig, steps: Sequence[Step]) -> nn.Module:
    """The baseline by name; for objectives without one, a module that they ignore."""
    return BASELINES["per-step" if name == NONE else name](value, steps)
