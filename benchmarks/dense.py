"""The paper's algorithm, written from the paper and laid out as most public code is: the thing to beat.

Everything is a dense (N, L, V) tensor. Each of the M clean samples is a Gumbel-softmax draw of its own over all sites
and the whole vocabulary; the transition is a dense categorical at every site; all particles go through the networks at
every step; rewards are asked for row by row, or in one batch for each draw. Where there was a choice, the cheaper one
was taken: the denoiser is asked once a step, SMC_base gives the reward ids and no one-hots, and its p/q = 1 is not
computed.

The target is the same as tokensteer's, p(x_0) · exp(r(x_0)/kl) with p the sampler's law after T steps; `check` in
benchmarks/run.py holds its log Z against enumeration. Randomness is torch's own: seed it with torch.manual_seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import gumbel_softmax, one_hot

Network = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Seen:
    """What is known of the particles at x_t: mu (N, L, V), the estimate r_hat (N,) and perhaps its gradient."""

    mu: Tensor
    estimate: Tensor
    gradient: Tensor | None

    def take(self, index: Tensor) -> Seen:
        return Seen(self.mu[index], self.estimate[index], None if self.gradient is None else self.gradient[index])


@dataclass(frozen=True)
class Dense:
    """SMC_base, or SMC_grad if `gradient`. Networks take ids (P, L) or one-hots (P, L, V)."""

    denoiser: Network
    reward: Network
    vocab: int
    length: int
    num_steps: int
    mask_id: int
    draws: int = 4
    kl: float = 1.0
    gradient: bool = False
    batched: bool = False
    interval: int = 20
    dtype: torch.dtype = torch.float32

    def run(self, num_particles: int, stop_after: int | None = None) -> tuple[Tensor, Tensor]:
        """Particles (N, L) and log-weights (N,), at the end or after the first `stop_after` steps."""
        x = torch.full((num_particles, self.length), self.mask_id)
        seen = self.look(x)
        log_w = torch.zeros(num_particles, dtype=torch.float64)  # psi is 0 at t = 1, where the ramp 1 - t is
        for index in range(self.num_steps)[:stop_after]:
            t, s = 1 - index / self.num_steps, 1 - (index + 1) / self.num_steps
            if index and index % self.interval == 0 and _ess(log_w) < num_particles / 2:
                parents = torch.multinomial(log_w.softmax(-1), num_particles, replacement=True)
                x, seen = x[parents], seen.take(parents)
                log_w = (log_w.logsumexp(-1) - math.log(num_particles)).expand(num_particles)
            x_s, log_ratio = self.move(x, seen, t, s)
            log_w = log_w + log_ratio - (1 - t) / self.kl * seen.estimate
            if index + 1 == self.num_steps:
                return x_s, log_w + self.rewards(x_s) / self.kl
            x, seen = x_s, self.look(x_s)
            log_w = log_w + (1 - s) / self.kl * seen.estimate
        return x, log_w

    def look(self, x: Tensor) -> Seen:
        """One forward pass, M draws one after the other, their mean reward, and one backward pass."""
        with torch.set_grad_enabled(self.gradient):
            hot = one_hot(x, self.vocab).to(self.dtype).requires_grad_(self.gradient)
            log_mu = self.log_mu(hot if self.gradient else x)
            estimate = torch.stack([self.rewards(self.draw(hot, log_mu)) for _ in range(self.draws)]).mean(0)
            gradient = torch.autograd.grad(estimate.sum(), hot)[0] if self.gradient else None
        return Seen(log_mu.detach().exp(), estimate.detach(), gradient)

    def log_mu(self, x: Tensor) -> Tensor:
        """log mu at every site, the mask forbidden."""
        mask = torch.arange(self.vocab) == self.mask_id
        return self.denoiser(x).masked_fill(mask, -math.inf).log_softmax(-1)

    def draw(self, hot: Tensor, log_mu: Tensor) -> Tensor:
        """x_0 ~ p(x_0 | x_t): Gumbel-softmax over everything, then what is visible is put back in."""
        drawn = gumbel_softmax(log_mu, hard=True)
        tokens = torch.arange(self.vocab) != self.mask_id
        clean = hot * tokens + hot[..., self.mask_id, None] * drawn
        return clean if self.gradient else clean.argmax(-1)

    def rewards(self, clean: Tensor) -> Tensor:
        """Row by row, or all at once."""
        return self.reward(clean) if self.batched else torch.cat([self.reward(row.unsqueeze(0)) for row in clean])

    def move(self, x: Tensor, seen: Seen, t: float, s: float) -> tuple[Tensor, Tensor]:
        """x_s ~ q(· | x_t) from dense categoricals, and log p - log q."""
        p = self.transition(x, seen.mu, t, s)
        if seen.gradient is None:
            return Categorical(probs=p, validate_args=False).sample(), torch.zeros(len(x), dtype=torch.float64)
        here = seen.gradient.gather(-1, x.unsqueeze(-1))
        log_p = p.log()
        q = Categorical(logits=log_p + (1 - s) / self.kl * (seen.gradient - here), validate_args=False)
        y = q.sample()
        log_p_y = log_p.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        return y, (log_p_y - q.log_prob(y)).double().sum(-1)

    def transition(self, x: Tensor, mu: Tensor, t: float, s: float) -> Tensor:
        """p(x_s | x_t) at every site with alpha = 1 - t, (N, L, V): the MDM sampler."""
        hot = one_hot(x, self.vocab).to(mu.dtype)
        mask = one_hot(torch.tensor(self.mask_id), self.vocab).to(mu.dtype)
        opened = (s * mask + (t - s) * mu) / t
        return torch.where((x == self.mask_id).unsqueeze(-1), opened, hot)


def _ess(log_w: Tensor) -> float:
    return float(1 / log_w.softmax(-1).square().sum())
