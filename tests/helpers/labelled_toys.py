"""A small network with a label for each population, and a reward, which both take ids or one-hots."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import tokensteer as ts

SITES, CODES, CLASSES, MASK = 2, 4, 3, 4
NO_CLASS = CLASSES


class Net(nn.Module):
    """Logits of a small random network that takes ids or one-hots and a label for each row."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def table(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64), requires_grad=False)

        self.tokens, self.labels = table(SITES, CODES + 1, 8), table(CLASSES + 1, 8)
        self.head = table(SITES, 8, CODES + 1)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        one_hots = x if x.is_floating_point() else nn.functional.one_hot(x, CODES + 1).double()
        h = torch.einsum("plv,lvh->ph", one_hots, self.tokens) + self.labels[label]
        return torch.einsum("ph,lhv->plv", h.tanh(), self.head)


NET = Net()


def model(*labels: int, **options) -> ts.Diffusion:
    denoiser = ts.from_logits(NET, MASK, ignores_time=True)
    canvas = ts.template(SITES, MASK)
    kernel = options.pop("kernel", ts.Ancestral(MASK))
    return ts.Diffusion(denoiser, kernel, ts.uniform_steps(4), canvas, context=torch.tensor(labels), **options)


def reward(x: Tensor) -> Tensor:
    one_hots = x if x.is_floating_point() else nn.functional.one_hot(x, CODES + 1).double()
    worth = torch.tensor([[0.0, 1.0, -1.0, 0.5, 0.0], [1.0, -0.5, 0.0, 0.3, 0.0]], dtype=torch.float64)
    return (one_hots * worth).sum((-2, -1))


TILT = ts.Tilt(reward, 0.5, draws=4, differentiable=True)
