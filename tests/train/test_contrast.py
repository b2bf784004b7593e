"""Proposals from labelled sequences: log q - log p is what Bayes' rule says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Generator, Tensor, nn
from toys import seeded

from tokensteer.train import Plan, fit
from tokensteer.train.contrast import Contrasted, ContrastLoss

MASK, VOCAB, LENGTH = 3, 4, 2


class Small(nn.Module):
    """Hidden states of the whole sequence at every site, and a head that predicts all letters alike."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(LENGTH * VOCAB, 32), nn.Tanh(), nn.Linear(32, LENGTH * 16))
        self.head = nn.Linear(16, VOCAB)
        nn.init.zeros_(self.head.weight)
        with torch.no_grad():
            self.head.bias.copy_(torch.tensor([0.0, 0.0, 0.0, -30.0]))

    def hidden(self, x: Tensor) -> Tensor:
        return self.inner(nn.functional.one_hot(x, VOCAB).float().flatten(1)).view(len(x), LENGTH, 16)


def states(rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """The first site is open or masked, the second always masked."""
    opened = torch.zeros(rows, LENGTH, dtype=torch.bool)
    opened[:, 0] = torch.rand(rows, generator=generator) < 0.5
    coming = torch.zeros_like(opened)
    coming[:, 0], coming[:, 1] = ~opened[:, 0], opened[:, 0]
    return opened, coming


@pytest.mark.parametrize("often", [1, 3])
def test_the_ratio_is_bayes_rule(often: int) -> None:
    """Two letters of three, y with probabilities that depend on both, rare and nearly certain ones. Repeated examples
    change nothing."""
    torch.manual_seed(0)
    probability = torch.tensor([[0.02, 0.05, 0.1], [0.5, 0.7, 0.2], [0.99, 0.97, 0.9]])
    generator = seeded()
    ids = torch.randint(3, (60_000, LENGTH), generator=generator)
    labels = torch.bernoulli(probability[ids[:, 0], ids[:, 1]], generator=generator).long()
    rows = torch.cat([(labels == 1).nonzero().flatten().repeat(often), (labels == 0).nonzero().flatten()])
    model, net = Small(), Small()
    net.load_state_dict(model.state_dict())
    loss = ContrastLoss(model.requires_grad_(False), states, MASK, often)
    plan = Plan(1500, batch_size=1024, rate=1e-2, weight_decay=0.0, average=0.99)
    fitted = fit(Contrasted(net, 16, 0.5), loss, ids[rows], labels[rows], plan=plan, generator=generator).net
    assert isinstance(fitted, Contrasted)
    with torch.no_grad():
        for first in (None, 0, 1, 2):
            x = torch.tensor([[MASK if first is None else first, MASK]])
            site, among = (0, ids[:, 0] >= 0) if first is None else (1, ids[:, 0] == first)
            chance = torch.stack([labels[among & (ids[:, site] == v)].double().mean() for v in range(3)])
            found = fitted.net.head(fitted.net.hidden(x))[0, site, :3].log_softmax(-1)  # pyright: ignore
            assert (found - chance.log().log_softmax(-1)).abs().max() < 0.08  # p is uniform


def test_too_high_a_probability_comes_back() -> None:
    """The loss of a label 0 has a gradient, however sure of 1 the network is."""
    model = Small()
    for chance in (math.exp(0.1), math.exp(0.5), math.exp(3.0)):
        net = Contrasted(model, 16, chance)
        loss = ContrastLoss(model, states, MASK)(net, torch.zeros(8, LENGTH).long(), torch.zeros(8), seeded())
        torch.autograd.backward(loss)
        assert torch.isfinite(loss)
        assert 1.0 < float(net.state.bias.grad or 0.0) < 51.0


def test_it_begins_as_a_coin() -> None:
    model = Small()
    loss = ContrastLoss(model, states, MASK)
    ids, labels = torch.randint(3, (64, LENGTH), generator=seeded()), torch.ones(64)
    for label in (0, 1):
        found = loss(Contrasted(model, 16, 0.5), ids, label * labels, seeded()).item()
        assert found == pytest.approx(math.log(2.0), abs=1e-6)
