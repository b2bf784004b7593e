"""Statistical checks shared by the tests: what a sampler estimates against exact answers, as z-scores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from toys import Following, Toy, case, multilinear

import tokensteer as ts
from tokensteer.testing import enumerate_steering

torch.set_num_threads(1)  # many small operations: more threads only get into one another's way


class Largest(TorchDispatchMode):
    """The most numbers that operations gave, by their names, whatever asked for them."""

    def __init__(self) -> None:
        super().__init__()
        self.numel: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        answers = answer if isinstance(answer, tuple | list) else (answer,)
        sizes = (found.numel() for found in answers if isinstance(found, Tensor))
        self.numel[name] = max(self.numel.get(name, 0), *sizes, 0)
        return answer


CHUNK = 2**16  # particles in one call
ROUNDING = 1e-7  # so that an estimate without variance is not judged by its last bits
POWERS = (case(8)["a"], case(8)["b"])  # the product of the toys


def steering(toy: Toy, sampler: str, target: str, proposal: str) -> ts.Steering:
    """A row of the table S01-S36: products of ReMDM aim at the path measure, as the golden ones do."""
    tilted, combined = "tilt" in target, "product" in target
    model = toy.product(sampler, *POWERS, correct_remasking=False) if combined else toy.model(sampler)
    twist = toy.tilt(sampler) if tilted else None
    match proposal:
        case "gradient" if tilted:
            q = ts.Gradient(base=ts.Guided() if combined else ts.FromModel())
        case "gradient":
            q = Following(visible_value(toy))
        case "optimal":
            q = ts.Enumerated() if tilted else ts.Optimal()
        case _:
            q = {"base": ts.FromModel, "cfg": ts.Guided, "learned": toy.amortised}[proposal]()
    return ts.Steering(model, twist, q)


def visible_value(toy: Toy):
    """(a - 1) log p1 + b log p2 of the visible tokens, multilinear: what a product without a tilt can follow."""

    def log_visible(joint: Tensor) -> Tensor:
        for site in range(joint.dim()):  # the mask stands for the sum over tokens
            joint = torch.cat([joint, joint.sum(site, keepdim=True)], site)
        return joint.log()

    a, b = POWERS
    table = (a - 1) * log_visible(toy.joint("p1")) + b * log_visible(toy.joint("p2"))
    return multilinear(table, toy.tokens + 1, toy.length)


@dataclass(frozen=True)
class Answer:
    """The truth: log Z, and the target over all clean sequences, lexicographically."""

    log_z: float
    target: Tensor
    clean: Tensor

    def masses(self, samples: Tensor, w: Tensor) -> Tensor:
        """The weight each population (B, N, L) gives to every clean sequence, (B, S)."""
        tokens, length = int(self.clean.max()) + 1, self.clean.shape[1]
        cell = (samples * tokens ** torch.arange(length - 1, -1, -1)).sum(-1)
        return w.new_zeros(len(w), len(self.target)).scatter_add(-1, cell, w)


def answer(model: ts.Model, twist: ts.Tilt | None = None, proposal: ts.Proposal | None = None) -> Answer:
    """By enumeration. The potential has no part in it, nor the proposal unless it chooses the sites."""
    twist = twist and replace(twist, potential=ts.potentials.difference)
    exact = enumerate_steering(ts.Steering(model, twist, proposal or ts.FromModel()))
    return Answer(exact.log_z, exact.target.double(), exact.states[exact.clean])


def runs(path: ts.FeynmanKac, particles: int, populations: int, seed: int, **options: Any) -> Iterator[ts.Result]:
    """Independent populations in calls of moderate size; multinomial resampling at every step unless told otherwise."""
    options = {"resample": ts.resampling.multinomial, "when": ts.triggers.always, **options}
    generator = torch.Generator().manual_seed(seed)
    at_once = max(1, CHUNK // particles)
    for start in range(0, populations, at_once):
        yield ts.smc(path, particles, min(at_once, populations - start), generator=generator, **options)


@dataclass(frozen=True)
class Trial:
    """Z_hat/Z of R populations, (R,), and Z_hat·W_hat(x_0)/Z of each for every clean sequence, (R, S)."""

    ratio: Tensor
    masses: Tensor
    target: Tensor
    particles: int

    @property
    def z(self) -> float:
        return self.z_against(0.0)

    @property
    def state_z(self) -> float:
        """The largest |z| over the sequences that are expected often enough for one: with a share of at least 1e-3,
        and 32 times in all."""
        heavy = self.target >= max(1e-3, 32 / (self.particles * len(self.ratio)))
        return float(_z(self.masses[:, heavy], self.target[heavy]).abs().max())

    def z_against(self, log_ratio: float) -> float:
        """z of the mean of Z_hat/Z against exp(log_ratio)."""
        return float(_z(self.ratio, math.exp(log_ratio)))

    @property
    def unbiased(self) -> bool:
        """The verdict: the normaliser and the whole vector Z·pi(x_0) are right, and the impossible never happens."""
        never = bool((self.masses[:, self.target == 0] == 0).all())
        return abs(self.z) < 4 and self.state_z < 4.5 and never

    def __str__(self) -> str:
        return f"mean of Z_hat/Z {float(self.ratio.mean()):.5f}, z {self.z:+.2f}, largest state |z| {self.state_z:.2f}"


def _z(estimates: Tensor, truth: Tensor | float) -> Tensor:
    error = estimates.std(0) / math.sqrt(len(estimates))
    return (estimates.mean(0) - truth) / (error + ROUNDING)


def judge(samples: Tensor, log_w: Tensor, truth: Answer) -> Trial:
    w = (log_w - truth.log_z).exp() / log_w.shape[-1]
    return Trial(w.sum(-1), truth.masses(samples, w), truth.target, log_w.shape[-1])


def trial(
    path: ts.FeynmanKac, truth: Answer, particles: int = 8, populations: int = 2048, seed: int = 0, **options: Any
) -> Trial:
    """Many small populations test as sharply as few large ones, and what goes wrong with few particles shows."""
    parts = [judge(r.samples, r.log_w, truth) for r in runs(path, particles, populations, seed, **options)]
    ratio, masses = (torch.cat([getattr(p, name) for p in parts]) for name in ("ratio", "masses"))
    return Trial(ratio, masses, truth.target, particles)


def total_variation(path: ts.FeynmanKac, truth: Answer, particles: int, seed: int = 0) -> float:
    """Between the weighted particles and the target, mean over 100 populations."""
    results = runs(path, particles, 100, seed)
    laws = torch.cat([truth.masses(result.samples, result.weights) for result in results])
    return float((laws - truth.target).abs().sum(-1).mean() / 2)
