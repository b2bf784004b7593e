"""What an estimate of -inf counts as before the end."""

from __future__ import annotations

import math

import pytest
import torch
from toys import Toy

import tokensteer as ts

B = Toy("B")


@pytest.mark.parametrize("kl", [0.5, 1.0, 4.0])
def test_a_floor_is_a_log_twist_whatever_kl(kl: float) -> None:
    """No draw met the constraint: that is worth ramp(t) · floor, which r/kl would shrink or stretch."""
    tilt = ts.Tilt(lambda x: torch.full((len(x),), -math.inf), kl, ramp=ts.ramps.linear, draws=2, floor=-3.0)
    steering = ts.Steering(B.model("mdm"), tilt)
    generator = torch.Generator().manual_seed(0)
    x = steering.start(4, generator)
    for t in (0.75, 0.25):
        assert steering.evaluate(x, t, generator).log_twist.tolist() == pytest.approx([-3.0 * (1 - t)] * 4)
    clean = torch.zeros_like(x)
    assert (steering.evaluate(clean, 0.0, generator).log_twist == -math.inf).all()  # at the end there is no floor
