"""Proposals from accepted sequences: the denoiser of the target, in the states that the sampler walks through."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Generator, Tensor, nn
from toys import seeded

from tokensteer.train import Plan, fit
from tokensteer.train.accepted import NextTokens, accepted

MASK, VOCAB, LENGTH = 3, 4, 2
CHANCE = torch.tensor([[0.02, 0.05, 0.1], [0.5, 0.7, 0.2], [0.99, 0.97, 0.9]])


class Small(nn.Module):
    """Hidden states of the whole sequence at every site, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(LENGTH * VOCAB, 32), nn.Tanh(), nn.Linear(32, LENGTH * 16))
        self.head = nn.Linear(16, VOCAB)

    def hidden(self, x: Tensor) -> Tensor:
        return self.inner(nn.functional.one_hot(x, VOCAB).float().flatten(1)).view(len(x), LENGTH, 16)


def states(rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """From left to right."""
    opened = torch.zeros(rows, LENGTH, dtype=torch.bool)
    opened[:, 0] = torch.rand(rows, generator=generator) < 0.5
    coming = torch.zeros_like(opened)
    coming[:, 0], coming[:, 1] = ~opened[:, 0], opened[:, 0]
    return opened, coming


def test_it_learns_the_denoiser_of_the_target() -> None:
    """Pairs of three letters, uniform under p, with a reward of both."""
    torch.manual_seed(0)
    generator = seeded()
    ids = torch.randint(3, (60_000, LENGTH), generator=generator)
    ids = ids[accepted(CHANCE.log()[ids[:, 0], ids[:, 1]].double() - 5.0, generator)]
    plan = Plan(600, batch_size=1024, rate=1e-2, weight_decay=0.0, average=0.99)
    net = fit(Small(), NextTokens(states, MASK), ids, plan=plan, generator=generator).net
    assert isinstance(net, Small)
    with torch.no_grad():
        for first in (None, 0, 1, 2):
            x, site = torch.tensor([[MASK if first is None else first, MASK]]), 0 if first is None else 1
            found = net.head(net.hidden(x))[0, site, :3].softmax(-1)
            exact = CHANCE.sum(1) if first is None else CHANCE[first]
            assert (found - exact / exact.sum()).abs().max() < 0.03


def test_how_often_sequences_are_accepted() -> None:
    log_w = torch.tensor([0.0, math.log(0.5), math.log(0.1), -math.inf]).repeat(10_000)
    kept = accepted(log_w, seeded())
    share = torch.bincount(kept % 4, minlength=4) / 10_000
    for k, chance in enumerate((1.0, 0.5, 0.1, 0.0)):
        assert abs(float(share[k]) - chance) <= 4.0 * math.sqrt(chance * (1.0 - chance) / 10_000)
    assert torch.equal(kept, accepted(log_w + 70.0, seeded()))  # rewards may be of any size
    with pytest.raises(ValueError, match="no sequence has a finite reward"):
        accepted(torch.full((3,), -math.inf), seeded())
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="is NaN or"):
            accepted(torch.tensor([0.0, bad]), seeded())


def test_the_mask_takes_no_mass() -> None:
    net, ids = Small(), torch.zeros(8, LENGTH, dtype=torch.long)
    loss = NextTokens(states, MASK)
    before = loss(net, ids, None, seeded()).item()
    with torch.no_grad():
        net.head.bias[MASK] += 10.0
    assert loss(net, ids, None, seeded()).item() == pytest.approx(before, abs=1e-5)
