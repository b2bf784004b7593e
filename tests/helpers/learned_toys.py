"""A proposal that is a table of logits, and a short training of it on toy B."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from toys import Toy, seeded

import tokensteer as ts
from tokensteer.train import ProposalPlan, fit_proposal

torch.set_num_threads(1)

B = Toy("B")


def place(x: Tensor, vocab_size: int) -> Tensor:
    return (x * vocab_size ** torch.arange(x.shape[-1] - 1, -1, -1)).sum(-1)


class Table(nn.Module):
    """Logits for each state, of all tokens at all sites."""

    def __init__(self, vocab_size: int, length: int) -> None:
        super().__init__()
        self.vocab_size, self.length = vocab_size, length
        shape = vocab_size**length, length, vocab_size
        self.logits = nn.Parameter(0.1 * torch.randn(shape, generator=seeded(), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits[place(x, self.vocab_size)]

    def denoiser(self) -> ts.Denoiser:
        return ts.from_logits(self, self.vocab_size - 1, ignores_time=True)


def denoiser_of(net: nn.Module) -> ts.Denoiser:
    assert isinstance(net, Table)
    return net.denoiser()


def small(checkpoint=None, rounds: int = 6, watch=None, num_steps: int | None = None, **options):
    torch.manual_seed(3)
    model = B.model("mdm")
    model = model if num_steps is None else replace(model, steps=ts.uniform_steps(num_steps))
    steering = ts.Steering(model, ts.Tilt(B.reward, B.kl, draws=2))
    settings = {"paths": 8, "updates": 2, "on_policy": 0.75, "replay": 2, "times": 2, "save_every": 1, "anneal": 0.5}
    return fit_proposal(
        steering,
        Table(4, B.length),
        lambda net: ts.from_logits(net, B.mask_id, ignores_time=True),
        plan=ProposalPlan(rounds, **(settings | options), report_every=4),
        generator=seeded(1),
        checkpoint=checkpoint,
        watch=watch,
    )
