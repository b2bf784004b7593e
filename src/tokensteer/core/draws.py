"""Draws from finite laws by inverting their cumulative sums."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

NEVER = -math.inf
WORKING = 2**28  # bytes of laws spelt out at once
APART = 0x5EED_1E55_0DD5
"""Added to seeds of shared noise: a run may well have the same seed, and must not draw the same numbers."""


def instead_of_never(values: Tensor, other: float) -> Tensor:
    """Another number where there is -inf."""
    return values.nan_to_num(nan=math.nan, posinf=math.inf, neginf=other)


def uniforms(shape: tuple[int, ...], like: Tensor, generator: Generator | None) -> Tensor:
    """Uniforms on (0, 1] in double precision: never 0, so that inverting a CDF never lands on an empty cell."""
    return 1.0 - torch.rand(shape, generator=generator, device=like.device, dtype=torch.float64)


def shared_uniforms(seed: int, draws: int, length: int, device: torch.device) -> Tensor:
    """Uniforms on (0, 1] that a seed stands for, (draws, length), in double precision. Those of a site are a Latin
    hypercube: one in each of as many equal parts as there are draws, so that they cover its law evenly."""
    generator = Generator("cpu").manual_seed((seed + APART) % 2**63)
    part = torch.rand(draws, length, generator=generator, device="cpu").argsort(0)
    within = 1.0 - torch.rand(draws, length, generator=generator, device="cpu", dtype=torch.float64)
    return ((part + within) / draws).to(device)


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """The smallest j with cdf_j >= u. `weights` (..., K) need not be normalised; u is (..., M) in (0, 1]."""
    cdf = weights.double().cumsum(-1)
    return torch.searchsorted(cdf / cdf[..., -1:], u.contiguous()).clamp_(max=weights.shape[-1] - 1)


def categorical(log_p: Tensor, generator: Generator | None) -> Tensor:
    """One draw from each row of (..., K) log-weights."""
    u, rows = uniforms((*log_p.shape[:-1], 1), log_p, generator), log_p.reshape(-1, log_p.shape[-1])
    some = max(1, WORKING // (32 * log_p.shape[-1]))  # sums are in double precision, so as few at once as need be
    parts = zip(torch.split(rows, some), torch.split(u.view(-1, 1), some), strict=True)
    drawn = [inverse_cdf((part - part.amax(-1, keepdim=True)).exp(), u) for part, u in parts]
    return torch.cat(drawn).view(log_p.shape[:-1])
