"""How the answer of a method is read off its result."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tokensteer.core.particles.result import Result


def some(result: Result, populations: Tensor) -> Result:
    """Some of the populations, chosen by their indices or by a mask, without the states of their steps."""
    samples = result.samples[populations]
    return replace(
        result,
        samples=samples,
        log_w=result.log_w[populations],
        reward=None if result.reward is None else result.reward[populations],
        ess=result.ess[:, populations],
        mean_reward=None if result.mean_reward is None else result.mean_reward[:, populations],
        ancestors=result.ancestors[:, populations],
        ramp=None if result.ramp is None else result.ramp[:, populations],
        templates=1 if result.templates == 1 else len(samples),  # templates may now have different numbers of them
        states=None,
        states_log_w=None,
    )


def weighted(result: Result) -> Result:
    """All particles with their weights."""
    return result


def unweighted(result: Result) -> Result:
    """All particles with equal weights."""
    return replace(result, log_w=torch.zeros_like(result.log_w))


def one_draw(result: Result) -> Result:
    """One posterior draw from each population."""
    return _alone(result, result.sample(1))


def best(result: Result) -> Result:
    """The best by reward of each population, which is not a posterior draw."""
    return _alone(result, result.best().unsqueeze(1))


def _alone(result: Result, samples: Tensor) -> Result:
    """Populations of one particle, samples (B, 1, L), each with the reward of the equal particle in its population."""
    twin = (result.samples == samples).all(-1).int().argmax(-1, keepdim=True)
    return Result(
        samples,
        log_w=torch.zeros_like(result.log_w[:, :1]),
        reward=None if result.reward is None else result.reward.gather(1, twin),
        ess=result.ess / result.log_w.shape[1],  # as a share of the particles drawn from
        mean_reward=None,
        ancestors=torch.zeros_like(twin).unsqueeze(0),
        rows={},
        generator=result.generator,
    )
