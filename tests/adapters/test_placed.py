"""Networks on another device than the particles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tokensteer as ts
from tokensteer import adapters
from tokensteer.tasks.common.task import check_device

MASK, LENGTH = 3, 4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, t: float) -> torch.Tensor:
        self.seen.append(x)
        embedded = x @ self.table.weight if x.is_floating_point() else self.table(x)
        return embedded + t + embedded.mean(1, keepdim=True)


def model(network: nn.Module) -> ts.Diffusion:
    return ts.Diffusion(
        ts.from_logits(network, MASK), ts.Ancestral(MASK), ts.uniform_steps(4), ts.template(LENGTH, MASK)
    )


@pytest.mark.parametrize("device", DEVICES)
def test_samples_are_those_of_the_network_itself(device):
    torch.manual_seed(0)
    plain = Tiny()
    there = Tiny()
    there.load_state_dict(plain.state_dict())

    def reward(x: torch.Tensor) -> torch.Tensor:
        return x[..., 1].sum(-1) if x.is_floating_point() else (x == 1).sum(-1).float()

    def run(network: nn.Module) -> ts.Result:
        tilt = ts.Tilt(reward, 0.5, draws=3, differentiable=True)
        return ts.smc_grad(model(network), tilt)(8, generator=torch.Generator().manual_seed(1))

    own, moved = run(plain), run(adapters.placed(there, device))
    assert moved.log_w.device.type == "cpu"
    assert torch.equal(own.samples, moved.samples)
    torch.testing.assert_close(own.log_w, moved.log_w, atol=1e-5, rtol=1e-5)
    assert {x.device.type for x in there.seen} == {device}


def test_64_bit_one_hots_reach_the_network_in_its_own_type():
    network = adapters.placed(Tiny(), "cpu")
    x = torch.eye(4, dtype=torch.float64).unsqueeze(0).requires_grad_()
    network(x, 0.5).sum().backward()
    tiny: Any = network.network
    assert tiny.seen[0].dtype == torch.float32
    assert x.grad is not None
    assert x.grad.dtype == torch.float64


def test_what_cannot_be_placed_is_said():
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        adapters.placed(lambda x: x, "cpu")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"use cpu, or adapters\.placed"):
        check_device("mps")
