"""Uniforms, and draws from finite distributions by inverting their cumulative sums."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

NEVER = -math.inf
WORKING = 2**28  # bytes of dense distributions computed at once
SEED_OFFSET = 0x5EED_1E55_0DD5  # added to seeds of shared noise, so that a run of the same seed draws other numbers


def replace_neg_inf(values: Tensor, other: float) -> Tensor:
    """The values with -inf replaced by another number."""
    return values.nan_to_num(nan=math.nan, posinf=math.inf, neginf=other)


def uniforms(shape: tuple[int, ...], like: Tensor, generator: Generator | None) -> Tensor:
    """Uniforms on (0, 1] in double precision: never 0, so that inverting a CDF never yields a cell without mass."""
    return 1.0 - torch.rand(shape, generator=generator, device=like.device, dtype=torch.float64)


def shared_uniforms(seed: int, draws: int, length: int, device: torch.device) -> Tensor:
    """Uniforms on (0, 1] from a seed, (draws, length), in double precision. Those of a site are a Latin hypercube: one
    in each of `draws` equal parts of (0, 1]."""
    generator = Generator("cpu").manual_seed((seed + SEED_OFFSET) % 2**63)
    part = torch.rand(draws, length, generator=generator, device="cpu").argsort(0)
    within = 1.0 - torch.rand(draws, length, generator=generator, device="cpu", dtype=torch.float64)
    return ((part + within) / draws).to(device)


def uniforms_at(where: Tensor, draws: int, generator: Generator | None) -> Tensor:
    """`draws` uniforms on (0, 1] at each of the sites `where` (P, L), arbitrary elsewhere, (P, L, draws). All rows are
    drawn at once, so that samples do not depend on the chunks."""
    if where.is_cuda:  # the host does not know the number of sites
        return uniforms((*where.shape, draws), where, generator)
    answer = torch.ones(*where.shape, draws, dtype=torch.float64, device=where.device)
    answer[where] = uniforms((int(where.sum()), draws), where, generator)
    return answer


def spread_uniforms(u: Tensor, count: int) -> Tensor:
    """`count` uniforms on (0, 1] from each of u (...) as a seed, (..., count), in double precision, by SplitMix64: the
    k-th is a hash of the seed and k."""
    places = torch.arange(1, count + 1, device=u.device)
    z = u.double().contiguous().view(torch.int64).unsqueeze(-1) + places * -0x61C8864680B583EB
    z = (z ^ _shifted(z, 30)).mul_(-0x40A7B892E31B1A47)
    z = (z ^ _shifted(z, 27)).mul_(-0x6B2FB644ECCEEE15)
    z ^= _shifted(z, 31)
    return (_shifted(z, 11) + 1).double().mul_(2.0**-53)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """z >> bits, filled with zeros; torch fills with the sign."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """The smallest j with cdf_j >= u. `weights` (..., K) need not be normalised; u is (..., M) in (0, 1]."""
    cdf = weights.double().cumsum(-1)
    return torch.searchsorted(cdf / cdf[..., -1:], u.contiguous()).clamp_(max=weights.shape[-1] - 1)


def categorical(log_p: Tensor, generator: Generator | None) -> Tensor:
    """One draw from each row of (..., K) log-weights."""
    u, rows = uniforms((*log_p.shape[:-1], 1), log_p, generator), log_p.reshape(-1, log_p.shape[-1])
    some = max(1, WORKING // (32 * log_p.shape[-1]))  # sums take double precision
    parts = zip(torch.split(rows, some), torch.split(u.view(-1, 1), some), strict=True)
    drawn = [inverse_cdf((part - part.amax(-1, keepdim=True)).exp(), u) for part, u in parts]
    return torch.cat(drawn).view(log_p.shape[:-1])
