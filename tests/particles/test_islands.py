"""Islands: groups of particles that resample on their own and are exchanged whole, by their mean weights."""

from __future__ import annotations

import math

import pytest
import torch
from checks import answer, steering, trial
from torch import Tensor
from toys import Toy, seeded

import tokensteer as ts

B = Toy("B")
STEERING = steering(B, "mdm", "tilt", "base")


def resampled(log_w: list[list[float]], count: int, fraction: float = 0.5) -> tuple[Tensor, Tensor]:
    scheme = ts.resampling.islands(count, fraction=fraction)
    return scheme(torch.tensor(log_w, dtype=torch.float64).log(), seeded())


@pytest.mark.parametrize("fraction", [0.5, 0.9])
@pytest.mark.parametrize(("count", "particles"), [(2, 8), (4, 8), (8, 8), (3, 12)])
def test_unbiased(count: int, particles: int, fraction: float) -> None:
    """log Z and the weight of every sequence, against enumeration, with a look at every step."""
    truth = answer(STEERING.model, STEERING.twist)
    scheme = ts.resampling.islands(count, fraction=fraction)
    outcome = trial(STEERING, truth, particles, 2048, seed=count, resample=scheme)
    assert outcome.unbiased, str(outcome)


def test_islands_of_little_weight_are_replaced_whole() -> None:
    """Of four islands one has nearly all the weight: all become copies, each with the mean weight of the four."""
    ancestors, log_w = resampled([[1e-9, 1e-9, 3.0, 5.0, 1e-9, 1e-9, 1e-9, 1e-9]], 4)
    assert ancestors.tolist() == [[2, 3, 2, 3, 2, 3, 2, 3]]
    assert torch.allclose(log_w.exp(), torch.tensor([[0.75, 1.25] * 4], dtype=torch.float64))


def test_islands_of_equal_weight_resample_on_their_own() -> None:
    """The first is uneven and the second is even: the second keeps its particles and weights."""
    ancestors, log_w = resampled([[8.0, 1e-9, 1e-9, 1e-9, 2.0, 2.5, 1.5, 2.0]], 2)
    assert ancestors.tolist() == [[0, 0, 0, 0, 4, 5, 6, 7]]
    assert torch.allclose(log_w.exp(), torch.tensor([[2.0] * 4 + [2.0, 2.5, 1.5, 2.0]], dtype=torch.float64))


def test_copies_of_an_island_resample_apart() -> None:
    """An exchange comes first, so that two copies of an island need not keep the same particles."""
    even, dead = [1.0, 1.0, 1.0, 1.0, 0.01], [0.0] * 5
    scheme = ts.resampling.islands(2, ts.resampling.multinomial, fraction=1.0)
    ancestors, _ = scheme(torch.tensor([even + dead], dtype=torch.float64).log(), seeded())
    assert (ancestors < 5).all()
    assert ancestors[0, :5].tolist() != ancestors[0, 5:].tolist()


def test_dead_islands_and_populations() -> None:
    """A dead island takes no part; a dead population stays dead, with ancestors that exist."""
    ancestors, log_w = resampled([[0.0, 0.0, 1.0, 1.0], [0.0] * 4], 2, fraction=1.0)
    assert ancestors[0].tolist() in ([2, 3, 2, 3], [3, 2, 3, 2])
    assert torch.allclose(log_w[0].exp(), torch.full((4,), 0.5, dtype=torch.float64))
    assert (log_w[1] == -math.inf).all()
    assert ((ancestors >= 0) & (ancestors < 4)).all()


def test_populations_stay_independent() -> None:
    """Islands are exchanged within a population: what happens in one changes nothing in another."""
    log_w = torch.randn(2, 8, generator=seeded(), dtype=torch.float64)
    heavy = log_w.clone()
    heavy[1] *= 10
    scheme = ts.resampling.islands(4, fraction=0.9)
    for first, second in zip(scheme(log_w, seeded()), scheme(heavy, seeded()), strict=True):
        assert torch.equal(first[0], second[0])


def test_one_island_and_islands_of_one_are_plain_resampling() -> None:
    log_w = torch.randn(50, 6, generator=seeded(), dtype=torch.float64)
    mean = (log_w.logsumexp(-1, keepdim=True) - math.log(6)).expand(-1, 6)
    for count in (1, 6):
        ancestors, after = ts.resampling.islands(count, fraction=1.0)(log_w, seeded())
        expected = 6 * log_w.softmax(-1)
        counts = torch.zeros_like(log_w).scatter_add(1, ancestors, torch.ones_like(log_w))
        assert torch.allclose(after, mean)
        assert ((counts - expected).abs() < 1).all()  # as systematic resampling gives


def test_islands_must_divide() -> None:
    with pytest.raises(ValueError, match="8 particles do not divide into 3 islands: take a multiple of 3"):
        ts.smc(STEERING, 8, resample=ts.resampling.islands(3), when=ts.triggers.always)
