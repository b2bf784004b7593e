"""Several results of one target as one.

Populations are independent, and exp(log_z) of each is unbiased. So is their mean in which each counts by its number of
particles, which is the mean weight of all particles put together: weights stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from tokensteer.core.numerics.rows import unique
from tokensteer.core.particles.resampling import ess, weights
from tokensteer.core.particles.result import Result

CHANCE = 8  # two runs with as many different sequences, in the same order and with equal weights, had the same seed


def merged(results: Sequence[Result]) -> Result:
    """See `Result.merge`."""
    _check(results)
    first, templates = results[0], results[0].templates
    if len(results) == 1 and len(first.log_w) == templates:
        return first

    def side_by_side(parts: Sequence[Tensor]) -> Tensor:
        """Tensors (B, N, ...) of each result as one, (templates, sum of B·N / templates, ...)."""
        return torch.cat([part.to(device).reshape(templates, -1, *part.shape[2:]) for part in parts], 1)

    device = first.log_w.device
    log_w = side_by_side([result.log_w for result in results])
    rewards = [result.reward for result in results if result.reward is not None]
    reward = side_by_side(rewards) if rewards else None
    share = weights(log_w)
    unknown = first.ess.new_full((len(first.ess) - 1, templates), math.nan)  # it would need the Z of every step
    mean = None if reward is None else torch.where(share > 0, share * reward, 0.0).sum(-1).to(unknown)
    return replace(
        first,
        samples=side_by_side([result.samples for result in results]),
        log_w=log_w,
        reward=reward,
        ess=torch.cat([unknown, ess(log_w).unsqueeze(0).to(unknown)]),
        mean_reward=None if mean is None else torch.cat([unknown, mean.unsqueeze(0)]),
        ancestors=_ancestors(results).to(device),
        rows=total_counts([result.rows for result in results]),
        saved=total_counts([result.saved for result in results]),
        ramp=None,
        states=None,
        states_log_w=None,
        pooled_from=torch.cat([_sizes(result).to(device) for result in results]),
    )


def _sizes(result: Result) -> Tensor:
    if result.pooled_from is not None:
        return result.pooled_from
    return torch.full((len(result.log_w) // result.templates,), result.log_w.shape[1])


def _ancestors(results: Sequence[Result]) -> Tensor:
    """Ancestors by their places among all particles of a template, (T + 1, templates, N)."""
    found, before = list[Tensor](), 0
    for result in results:
        own = result.ancestors.cpu()
        own = own.view(len(own), result.templates, -1, own.shape[-1])
        starts = before + own.shape[-1] * torch.arange(own.shape[2]).unsqueeze(-1)
        found.append((own + starts).flatten(2))
        before += found[-1].shape[-1]
    return torch.cat(found, -1)


def total_counts(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The sums of network rows, by name."""
    names = sorted({name for count in counts for name in count})
    return {name: sum(count.get(name, 0) for count in counts) for name in names}


def _check(results: Sequence[Result]) -> None:
    if not results:
        raise ValueError("Result.merge got no result: give it a list of results, Result.merge([first, second])")
    for number, result in enumerate(results):
        if not isinstance(result, Result):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Result.merge takes a list of results, and number {number} is a {type(result).__name__}")
    described = [_described(result) for result in results]
    if len(set(described)) > 1:
        different = next(text for text in described if text != described[0])
        raise ValueError(
            f"Result.merge takes runs of one target, and got {described[0]} beside {different}: merge each group alone"
        )
    for (i, first), (k, second) in combinations(enumerate(results), 2):
        if _same_run(first, second):
            raise ValueError(
                f"Result.merge got the same run twice, numbers {i} and {k}, and errors would be too small: give every "
                "run a generator with a seed of its own"
            )


def _described(result: Result) -> str:
    rewarded = "with rewards" if result.reward is not None else "without rewards"
    length, steps = result.samples.shape[-1], len(result.ess) - 1
    return f"{length} tokens in {steps} steps of {result.templates} templates {rewarded}"


def _same_run(first: Result, second: Result) -> bool:
    """Whether all samples and weights are equal, and so many sequences differ that it is no coincidence."""
    if not (first.log_w.shape == second.log_w.shape and first.samples.shape == second.samples.shape):
        return False
    equal = torch.equal(first.log_w.cpu(), second.log_w.cpu()) and torch.equal(
        first.samples.cpu(), second.samples.cpu()
    )
    return equal and len(unique(first.samples.flatten(0, 1))[0]) >= CHANCE
