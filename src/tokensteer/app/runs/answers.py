"""How the answer of a method is read off its result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokensteer.core.particles.result import Result


def some(result: Result, populations: Tensor) -> Result:
    """Some of the populations, chosen by their indices or by a mask."""

    def of(values: Tensor | None) -> Any:
        return None if values is None else values[:, populations]

    samples = result.samples[populations]
    return replace(
        result,
        samples=samples,
        log_w=result.log_w[populations],
        reward=None if result.reward is None else result.reward[populations],
        ess=of(result.ess),
        mean_reward=of(result.mean_reward),
        ancestors=of(result.ancestors),
        ramp=of(result.ramp),
        templates=1 if result.templates == 1 else len(samples),  # of which each has how many is no longer known
    )


def weighted(result: Result) -> Result:
    """All particles with their weights."""
    return result


def unweighted(result: Result) -> Result:
    """All particles as they are, as if there were no weights."""
    return replace(result, log_w=torch.zeros_like(result.log_w))


def one_draw(result: Result) -> Result:
    """One posterior draw from each population."""
    return _alone(result, result.sample(1))


def best(result: Result) -> Result:
    """The best by reward of each population, which is no posterior draw."""
    return _alone(result, result.best().unsqueeze(1))


def _alone(result: Result, samples: Tensor) -> Result:
    """Populations of one particle each, whose reward is that of its twin among the particles."""
    twin = (result.samples == samples).all(-1).int().argmax(-1, keepdim=True)
    reward = None if result.reward is None else result.reward.gather(1, twin)
    return Result(
        samples,
        log_w=torch.zeros_like(result.log_w[:, :1]),
        reward=reward,
        ess=result.ess / result.log_w.shape[1],  # the share of the particles that were drawn from
        mean_reward=None,
        ancestors=torch.zeros_like(twin).unsqueeze(0),
        rows={},
        generator=result.generator,
    )
