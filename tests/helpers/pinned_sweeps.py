"""Exact draws of the target on paths, and what one conditional sweep makes of them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from toys import multilinear, seeded

import tokensteer as ts
from tokensteer.core.particles.gibbs import Pinned, pick
from tokensteer.testing import enumerate_steering


def exact_paths(steering: ts.Steering, count: int, generator: torch.Generator) -> Tensor:
    """Independent draws from the target on trajectories, (T + 1, count, L): with the soft value as twist and the
    optimal proposal every path is one."""
    twist = steering.twist
    assert twist is not None
    exact = enumerate_steering(steering)
    num_steps, vocab_size = len(steering.steps), steering.model.vocab_size
    tables = [multilinear(v * twist.kl, vocab_size, exact.states.shape[1]) for v in exact.log_value]
    value = ts.Value(lambda x, t: tables[num_steps - round(t * num_steps)](x))
    best = replace(twist, ramp=ts.ramps.constant, estimator=value, potential=ts.potentials.difference)
    perfect = replace(steering, twist=best, proposal=ts.Enumerated())
    return torch.stack([r.x[:, 0] for r in ts.sweep(perfect, 1, count, when=ts.triggers.never, generator=generator)])


def largest_z(samples: Tensor, clean: Tensor, p: Tensor) -> float:
    share = (samples.unsqueeze(1) == clean).all(-1).double().mean(0)
    return float(((share - p) / (p * (1 - p) / len(samples)).sqrt())[p > 1e-3].abs().max())


def one_sweep(steering: ts.Steering, kind: type[Pinned], when, count: int, **options) -> tuple[float, float]:
    """From exact draws: the largest z-score after one conditional sweep, and the share of chains that moved."""
    generator = seeded(11)
    paths = exact_paths(steering, count, generator)
    exact = enumerate_steering(steering)
    clean = exact.states[exact.clean]
    assert largest_z(paths[-1], clean, exact.target) < 4.5
    pinned = kind(steering, paths, **options)
    records = list(ts.sweep(pinned, 3, count, resample=pinned.resample, when=when, generator=generator))
    after = pick(records, generator)[-1]
    return largest_z(after, clean, exact.target), float((after != paths[-1]).any(-1).double().mean())
