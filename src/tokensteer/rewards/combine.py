"""Rewards made of rewards.

    weighted      sum_i w_i · r_i          exp(weighted/kl) is a product of experts, each tempered by its weight
    product       prod_i r_i^a_i           for values such as probabilities that should all be high
    log_product   sum_i a_i · log r_i      the same in logs, where a product of many small numbers would underflow

A combination takes one-hots if all its parts do. If all of them take embedded tokens, so does it: its embedding is
their concatenation, (V, d_1 + d_2 + ...), and each part reads its own columns. If the tilt has a context, all parts
are called with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from tokensteer.core.models.denoiser import Embedded
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.twists.tilt import Reward

Rule = Callable[[Sequence[Tensor], Sequence[float]], Tensor]


@runtime_checkable
class DeclaresGradient(Protocol):
    """A reward that declares whether it takes one-hots."""

    @property
    def differentiable(self) -> bool: ...


@dataclass(frozen=True, eq=False)
class Combined:
    """rule(rewards of the parts, weights), for ids (P, L), or one-hots (P, L, V) if `differentiable`."""

    parts: tuple[Reward, ...]
    weights: tuple[float, ...]
    rule: Rule

    @property
    def differentiable(self) -> bool:
        return all(isinstance(part, DeclaresGradient) and part.differentiable for part in self.parts)

    def __call__(self, x0: Tensor, *context: Tensor) -> Tensor:
        return self.rule([_copied(part(x0, *context)) for part in self.parts], self.weights)


@dataclass(frozen=True, eq=False)
class CombinedEmbedded:
    """The same for parts that all take embedded tokens; made once the parts are on their device."""

    combined: Combined
    parts: tuple[Embedded, ...]
    embedding: Tensor
    differentiable: bool = True

    def __call__(self, x0: Tensor, *context: Tensor) -> Tensor:
        return self.combined(x0, *context)

    def of_embeddings(self, embedded: Tensor, *context: Tensor) -> Tensor:
        columns = torch.split(embedded, [part.embedding.shape[1] for part in self.parts], -1)
        pairs = zip(self.parts, columns, strict=True)
        rewards = [_copied(part.of_embeddings(own, *context)) for part, own in pairs]
        return self.combined.rule(rewards, self.combined.weights)


def weighted(parts: Mapping[Reward, float]) -> Combined | CombinedEmbedded:
    """sum_i w_i · r_i for {r_i: w_i}. A hard constraint (-inf) needs a positive weight."""
    return _combine("weighted", parts, _sum)


def product(parts: Mapping[Reward, float]) -> Combined | CombinedEmbedded:
    """prod_i r_i^a_i for {r_i: a_i}."""
    return _combine("product", parts, _product)


def log_product(parts: Mapping[Reward, float]) -> Combined | CombinedEmbedded:
    """sum_i a_i · log r_i for {r_i: a_i} with r_i >= 0; -inf where one with a positive power is zero."""
    return _combine("log_product", parts, lambda rewards, powers: _sum([_log(r) for r in rewards], powers))


def _combine(name: str, parts: Mapping[Reward, float], rule: Rule) -> Combined | CombinedEmbedded:
    if not parts:
        raise ValueError(f"{name}: give at least one reward, as {{reward: weight}}")
    for weight in parts.values():
        if not math.isfinite(weight) or weight == 0:
            raise ValueError(f"{name}: weights must be finite and not 0, got {weight}: leave the reward out instead")
    combined = Combined(tuple(parts), tuple(parts.values()), rule)
    embedded = tuple(part for part in parts if isinstance(part, Embedded))
    sizes = {len(part.embedding) for part in embedded}
    if len(embedded) < len(parts) or len(sizes) > 1 or not combined.differentiable:
        return combined
    return CombinedEmbedded(combined, embedded, torch.cat([part.embedding.detach() for part in embedded], -1))


def _copied(r: Tensor) -> Tensor:
    """A copy in single precision at least: parts may reuse the memory of their output."""
    return r.to(torch.promote_types(r.dtype, torch.float32), copy=True)


def _sum(rewards: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return torch.stack([w * r for r, w in zip(rewards, weights, strict=True)]).sum(0)


def _product(rewards: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return torch.stack([r**a for r, a in zip(rewards, weights, strict=True)]).prod(0)


def _log(r: Tensor) -> Tensor:
    """log with -inf at zero, where the gradient is zero and not NaN; NaN below."""
    zero = r == 0
    return torch.where(zero, 1.0, r).log().masked_fill(zero, NEVER)
