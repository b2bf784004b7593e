"""A mixture of nine Gaussians on a grid, small enough to compute everything exactly.

Two sites X, Y with 64 states each: draws from Gaussians at {-4, 0, 4}² with variance 0.3, sorted into 64 equal bins of
[-6, 6] (the outermost bins extend to infinity). The reward is r = -x²/100 - y² at x = 12(X/63 - 1/2), y likewise: it is
high for y near 0 and hardly depends on x.

With equal weights the coordinates are independent, so the model has the distribution of the data for any number of
steps. With other weights, a sampler of T equal steps opens both sites in the same step with probability 1/T, and then
independently: its distribution is (1 - 1/T)·p + p_X·p_Y/T.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokensteer.core.kernels.masked import Ancestral
from tokensteer.core.kernels.schedule import uniform_steps
from tokensteer.core.models.diffusion import Denoiser, Diffusion
from tokensteer.core.models.template import template
from tokensteer.core.twists.estimators import Sampled, Value
from tokensteer.core.twists.ramps import Ramp
from tokensteer.core.twists.ramps import linear as linear_ramp
from tokensteer.core.twists.tilt import Estimator, Tilt
from tokensteer.tasks.common.grid import MASK, STATES, coordinates

CENTRES = (-4.0, 0.0, 4.0)
VARIANCE = 0.3


def pmf(weights: Tensor | None = None) -> Tensor:
    """The data, (64, 64). `weights` (3, 3) of the Gaussians by x and y, of any scale; equal if not given."""
    edges = 12.0 * (torch.arange(STATES + 1, dtype=torch.float64) / STATES - 0.5)
    edges[0], edges[-1] = -math.inf, math.inf
    centres = torch.tensor(CENTRES, dtype=torch.float64).unsqueeze(-1)
    bins = _normal_mass((edges - centres) / math.sqrt(VARIANCE))
    weights = torch.ones(3, 3) if weights is None else weights
    joint = bins.T @ weights.to(bins.dtype) @ bins
    return joint / joint.sum()


def _normal_mass(edges: Tensor) -> Tensor:
    """The standard normal mass between neighbouring edges, from the nearer tail so that no bin is rounded to zero."""
    low, high = edges[..., :-1], edges[..., 1:]
    right = low > 0
    low, high = torch.where(right, -high, low), torch.where(right, -low, high)
    return 0.5 * (torch.erfc(-high / math.sqrt(2)) - torch.erfc(-low / math.sqrt(2)))


def denoiser(joint: Tensor) -> Denoiser:
    """The exact denoiser of a pmf on two sites, for ids and one-hots: `testing.TableDenoiser`, but a lookup for ids.
    The prediction at one site depends on the token at the other, so the table has a row for each token."""

    def from_one_hots(x: Tensor) -> Tensor:
        allowed = x[..., :STATES] + x[..., STATES:]
        masses = torch.stack([allowed[:, 1] @ joint.T, allowed[:, 0] @ joint], 1)
        log_p = masses.log() - masses.sum(-1, keepdim=True).log()
        return torch.cat([log_p, torch.full_like(log_p[..., :1], -math.inf)], -1)

    every_token = torch.eye(STATES + 1, dtype=joint.dtype)
    table = from_one_hots(torch.stack([every_token, every_token], 1))
    sites = torch.arange(2)

    def denoise(x: Tensor, t: float) -> Tensor:
        return from_one_hots(x) if x.is_floating_point() else table[x.flip(-1), sites]

    return denoise


def model(num_steps: int = 100, joint: Tensor | None = None) -> Diffusion:
    """The masked diffusion with the exact denoiser of `joint`, the data unless given."""
    exact = denoiser(pmf() if joint is None else joint)
    return Diffusion(exact, Ancestral(MASK), uniform_steps(num_steps), template(2, MASK))


def site_rewards() -> Tensor:
    """The reward of each state at each site, (2, 64)."""
    squares = coordinates().square()
    return torch.stack([-squares / 100.0, -squares])


def reward(x: Tensor) -> Tensor:
    """r = -x²/100 - y² of ids (P, 2), or of one-hots (P, 2, 65), in which it is linear."""
    table = site_rewards()
    if x.is_floating_point():
        return (x[..., :STATES] * table.to(x.dtype)).sum((-2, -1))
    return table[torch.arange(2), x].sum(-1)


def soft_value(model: Diffusion, kl: float = 1.0) -> Value:
    """kl · log E[exp(r/kl) | x_t] in closed form: the reward is a sum over sites, so the expectation is a product.

    It equals `Exact()` without enumeration. It is linear in the one-hots of each site, between the rewards of its
    tokens and the value of its mask, so its gradient has the exact value of each token.
    """
    rewards = site_rewards()

    def value(x: Tensor, t: float) -> Tensor:
        masked = kl * (model.denoiser(x, t)[..., :STATES] + rewards / kl).logsumexp(-1)
        if x.is_floating_point():
            return ((x[..., :STATES] * rewards).sum(-1) + x[..., MASK] * masked).sum(-1)
        known = rewards[torch.arange(2), x.clamp(max=STATES - 1)]
        return torch.where(x == MASK, masked, known).sum(-1)

    return Value(value, model.ignores_time)


def tilt(kl: float = 1.0, draws: int = 10, ramp: Ramp = linear_ramp, estimator: Estimator | None = None) -> Tilt:
    """The paper's tilt; `estimator` is 10 draws unless given, for example `soft_value(model)`."""
    return Tilt(reward, kl, ramp, draws, estimator=Sampled() if estimator is None else estimator, differentiable=True)
