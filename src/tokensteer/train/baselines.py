"""Baselines F(x_t, t), the expected log-weight of a move, from ids (P, L) to (P,).

With a baseline of x_t alone the loss can reach zero, and F is then a value function: see `Balance` and `LearnedTwist`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tokensteer.core.models.denoiser import Time
from tokensteer.core.numerics.domains import check_wholes
from tokensteer.core.particles.path import Step


class PerStep(nn.Module):
    """A number for each step, as in the paper."""

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        check_wholes("PerStep", 1, steps=len(steps))
        self.times: Tensor
        self.register_buffer("times", torch.tensor([step.t for step in steps], dtype=torch.float64))
        self.values = nn.Parameter(torch.zeros(len(steps)))

    def forward(self, x: Tensor, t: Time) -> Tensor:
        times = torch.as_tensor(t, dtype=torch.float64, device=x.device).expand(len(x))
        return self.values[(times.unsqueeze(-1) - self.times).abs().argmin(-1)]


class OfTime(nn.Module):
    """An MLP of the time alone."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        check_wholes("OfTime", 1, width=width)
        self.first = nn.Linear(1, width)
        self.rest = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), _zero_layer(width))

    def forward(self, x: Tensor, t: Time) -> Tensor:
        times = torch.as_tensor(t, device=x.device).expand(len(x)).unsqueeze(-1).to(self.first.weight)
        return self.rest(self.first(times)).squeeze(-1)


class OfState(nn.Module):
    """An MLP of the state and the time, after a sum over sites. For large canvases use a network made for them: any
    module called as net(x, t) works."""

    def __init__(self, vocab_size: int, length: int, width: int = 128) -> None:
        super().__init__()
        check_wholes("OfState", 1, vocab_size=vocab_size, length=length, width=width)
        self.tokens = nn.Embedding(vocab_size, width)
        self.places = nn.Parameter(0.3 * torch.randn(length, width))
        self.site = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.whole = nn.Sequential(nn.Linear(width + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.last = _zero_layer(width)

    def forward(self, x: Tensor, t: Time) -> Tensor:
        sites = self.site(self.tokens(x) + self.places).sum(1) / math.sqrt(x.shape[1])
        times = torch.as_tensor(t, device=x.device).expand(len(x)).unsqueeze(-1).to(sites.dtype)
        return self.last(self.whole(torch.cat([sites, times], -1))).squeeze(-1)


def _zero_layer(width: int) -> nn.Linear:
    """A layer to a single number, zero at first."""
    layer = nn.Linear(width, 1)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
