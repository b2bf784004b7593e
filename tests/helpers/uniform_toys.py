"""The toys under uniform noise: exact denoisers, models and tilts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from toys import Toy, multilinear

import tokensteer as ts

NUM_STEPS = 3
SCHEDULE = ts.Linear()


@dataclass(frozen=True)
class NoisyDenoiser:
    """p(x_0^l | x_t) exactly, for a joint law whose sites were replaced by noise of a law v; also for one-hots."""

    joint: Tensor
    schedule: ts.Schedule
    prior: tuple[float, ...]

    def __call__(self, x: Tensor, t: float) -> Tensor:
        size, alpha = self.joint.shape[0], self.schedule.alpha(t)
        if not x.is_floating_point():
            x = torch.nn.functional.one_hot(x, size).to(self.joint.dtype)
        likelihood = alpha * x + (1 - alpha) * (x @ torch.tensor(self.prior, dtype=x.dtype)).unsqueeze(-1)
        answers = []
        for site in range(self.joint.dim()):
            left = self.joint.movedim(site, -1).expand(len(x), *self.joint.shape)
            for other in (k for k in range(self.joint.dim()) if k != site):
                left = (left * likelihood[:, other].view(len(x), size, *[1] * (left.dim() - 2))).sum(1)
            answers.append(left * likelihood[:, site])
        masses = torch.stack(answers, 1)
        return masses.log() - masses.sum(-1, keepdim=True).log()


def uniform_denoiser(joint: Tensor, schedule: ts.Schedule) -> NoisyDenoiser:
    return NoisyDenoiser(joint, schedule, (1 / len(joint),) * len(joint))


def model(toy: Toy, joint: str = "p1", canvas: Tensor | None = None) -> ts.Diffusion:
    kernel = ts.uniform_noise(toy.tokens, SCHEDULE)
    free = torch.full((toy.length,), ts.NO_MASK)
    denoiser = uniform_denoiser(toy.joint(joint), SCHEDULE)
    return ts.Diffusion(denoiser, kernel, ts.uniform_steps(NUM_STEPS), free if canvas is None else canvas)


def known_tilt(toy: Toy, **options) -> ts.Tilt:
    """The reward itself as the known value of a noisy sequence, differentiable in one-hots."""
    value = multilinear(toy.reward(toy.clean), toy.tokens, toy.length)
    return ts.Tilt(toy.reward, **{"kl": toy.kl, "estimator": ts.Value(value), **options})
