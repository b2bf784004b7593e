"""SGDD, split Gibbs sampling with uniform noise (Chu et al., 2025; splitting: Vono et al., 2019; docs/references.md).

The target p(x) · exp(r(x)/kl) is split over two sequences, coupled by noise at time t,

    pi_t(x, z) ∝ p(x) · q_t(z | x) · exp(r(z)/kl),      q_t the forward process.

z given x is drawn by Metropolis-Hastings (Hastings, 1970), one token at a time; x given z by the reverse process from z
at time t, which approximates p(x) · q_t(z | x). As t falls, z approaches x. This is a baseline without weights: nothing
corrects for few reverse steps, a short chain, or the noise that is left.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from tokensteer.core.kernels.kernel import NO_MASK
from tokensteer.core.kernels.noise import Interpolating
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.numerics.domains import check_whole
from tokensteer.core.numerics.draws import uniforms
from tokensteer.core.particles.path import Step
from tokensteer.core.particles.result import Result, with_rows
from tokensteer.core.steering.steering import Steering
from tokensteer.core.twists.tilt import Tilt


@dataclass(frozen=True)
class SplitGibbs:
    """`rounds` at times that fall from `first` to `last` by equal factors, each with `flips` proposed token changes of
    z and `steps` reverse steps for x. The defaults cost as many denoiser rows as a hundred steps of plain sampling, and
    eight times as many reward rows."""

    rounds: int = 20
    steps: int = 5
    flips: int = 40
    first: float = 0.9
    last: float = 0.02

    def __post_init__(self) -> None:
        for name in ("rounds", "steps", "flips"):
            check_whole(f"SplitGibbs.{name}", getattr(self, name))
        if not 0 < self.last <= self.first <= 1:
            raise ValueError(f"SplitGibbs: times must fall from first to last within (0, 1], got {self}")

    def times(self) -> list[float]:
        if self.rounds == 1:
            return [self.last]
        return [self.first * (self.last / self.first) ** (k / (self.rounds - 1)) for k in range(self.rounds)]

    def __call__(
        self, steering: Steering, num_particles: int, populations: int = 1, *, generator: Generator | None = None
    ) -> Result:
        """The last x of independent chains, all of equal weight."""
        check_whole("num_particles", num_particles)
        check_whole("populations", populations)
        model, tilt = steering.model, steering.twist
        if tilt is None:
            raise ValueError("split Gibbs sampling needs a reward: give the steering a Tilt")
        if not isinstance(model, Diffusion) or not isinstance(model.kernel, Interpolating):
            raise ValueError("split Gibbs sampling needs uniform noise: give Diffusion a uniform_noise kernel")
        before, reverse = steering.resources.spent(), Steering(model)
        z = model.start(num_particles * populations, generator)
        x = _denoised(reverse, z, self.first, self.steps, generator)
        for t in self.times():
            z = _noised(model, tilt, x, z, t, self.flips, generator)
            x = _denoised(reverse, z, t, self.steps, generator)
        with torch.no_grad():
            reward = tilt.exact(x).view(populations, num_particles)
        result = Result(
            x.view(populations, num_particles, -1),
            log_w=torch.zeros_like(reward, dtype=torch.float64),
            reward=reward,
            ess=torch.full((1, populations), float(num_particles), dtype=torch.float64, device=x.device),
            mean_reward=reward.double().mean(-1).unsqueeze(0),
            ancestors=torch.arange(num_particles, device=x.device).expand(1, populations, -1),
            rows={},
            generator=generator,
        )
        return with_rows(result, before, steering.resources.spent())


def _denoised(reverse: Steering, z: Tensor, t: float, count: int, generator: Generator | None) -> Tensor:
    """x given z at time t, by `count` steps of the reverse process."""
    times = [t * (1.0 - i / count) for i in range(count)] + [0.0]
    for i in range(count):
        step = Step(i, times[i], times[i + 1])
        z = reverse.move(z, reverse.evaluate(z, step.t, generator), step, generator).x
    return z


@torch.no_grad()
def _noised(
    model: Diffusion, tilt: Tilt, x: Tensor, z: Tensor, t: float, flips: int, generator: Generator | None
) -> Tensor:
    """z given x: `flips` proposals of another token at a random free site, each accepted with probability
    min(1, ratio of q_t(z | x) · exp(r(z)/kl))."""
    kernel = model.kernel
    assert isinstance(kernel, Interpolating)
    row, like = torch.arange(len(z), device=z.device), torch.zeros((), dtype=model.dtype, device=z.device)
    law, alpha = kernel.law(like), kernel.schedule.alpha(t)
    free = model.canvas(len(z)) == NO_MASK
    log_r = tilt.scale(0.0) * tilt.exact(z)

    def log_q(letter: Tensor, clean: Tensor) -> Tensor:
        return (alpha * (letter == clean).to(law) + (1.0 - alpha) * law[letter]).log()

    for _ in range(flips):
        u = uniforms((3, len(z)), like, generator)
        place = (u[0] * free.sum(-1)).ceil().long().clamp(min=1)  # u is in (0, 1]
        site = (free.cumsum(-1) >= place.unsqueeze(-1)).int().argmax(-1)
        old = z[row, site]
        new = (old + (u[1] * (len(law) - 1)).ceil().long().clamp(min=1)) % len(law)
        proposed = z.index_put((row, site), new)
        log_r_new = tilt.scale(0.0) * tilt.exact(proposed)
        clean = x[row, site]
        ratio = log_r_new - log_r + log_q(new, clean) - log_q(old, clean)
        taken = (u[2].log() <= ratio) & free[row, site]  # a template may have no free site
        z, log_r = torch.where(taken.unsqueeze(-1), proposed, z), torch.where(taken, log_r_new, log_r)
    return z
