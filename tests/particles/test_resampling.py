"""Resamplers: exact expectations where the comb is fixed, unbiased counts, and no accident with odd weights."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tokensteer as ts
from tokensteer.core.particles.resampling import log_mean_weight, weights

RESAMPLERS = {
    "multinomial": ts.resampling.multinomial,
    "systematic": ts.resampling.systematic,
    "stratified": ts.resampling.stratified,
    "residual": ts.resampling.residual,
    "ssp": ts.resampling.ssp,
    "one_survivor": ts.resampling.one_survivor,
    "nested": ts.resampling.nested(ts.resampling.systematic, 2),
    "islands": ts.resampling.islands(2, ts.resampling.systematic, 0.9),
    "partial": ts.resampling.partial(ts.resampling.systematic, 0.5),
    "partial_ssp": ts.resampling.partial(ts.resampling.ssp, 0.75),
}
LOW_VARIANCE = ["systematic", "residual", "ssp"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mean_children(name: str, log_w: torch.Tensor, draws: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard error over draws of the weight that the children of each particle carry."""
    ancestors, after = RESAMPLERS[name](log_w.expand(draws, -1), seeded(3))
    carried = torch.zeros(draws, log_w.shape[-1], dtype=torch.float64).scatter_add(1, ancestors, after.exp())
    return carried.mean(0), carried.std(0) / math.sqrt(draws)


@pytest.mark.parametrize("name", RESAMPLERS)
@pytest.mark.parametrize("n", [6, 8])
def test_children_carry_their_parents_weight_in_expectation(name: str, n: int) -> None:
    log_w = torch.randn(n, generator=seeded(n), dtype=torch.float64) * 1.5
    mean, error = mean_children(name, log_w, 40_000)
    assert ((mean - log_w.exp()).abs() <= 4.5 * error + 1e-12).all()


@pytest.mark.parametrize("name", LOW_VARIANCE)
def test_counts_are_floor_or_ceil(name: str) -> None:
    log_w = torch.randn(200, 13, generator=seeded(1), dtype=torch.float64)
    ancestors, _ = RESAMPLERS[name](log_w, seeded())
    counts = torch.zeros(200, 13, dtype=torch.float64).scatter_add(
        1, ancestors, torch.ones(200, 13, dtype=torch.float64)
    )
    expected = 13 * weights(log_w)
    assert (counts >= expected.floor() - 1e-9).all()
    if name != "residual":  # the multinomial remainder of residual resampling may give one particle several more
        assert (counts <= expected.ceil() + 1e-9).all()


log_weights = st.lists(
    st.one_of(
        st.floats(-800, 800),
        st.sampled_from([-math.inf, 0.0, -745.2, 1e-300]),
    ),
    min_size=2,
    max_size=16,
).map(lambda values: values if len(values) % 2 == 0 else [*values, values[0]])


@settings(max_examples=150, deadline=None)
@given(log_weights, st.integers(0, 2**31), st.sampled_from(sorted(RESAMPLERS)))
def test_any_weights_will_do(values: list[float], seed: int, name: str) -> None:
    log_w = torch.tensor([values, values], dtype=torch.float64)
    ancestors, after = RESAMPLERS[name](log_w, seeded(seed))
    assert ancestors.shape == log_w.shape
    assert ((ancestors >= 0) & (ancestors < len(values))).all()
    assert not after.isnan().any()
    before = log_mean_weight(log_w)
    kept = log_mean_weight(after)
    alive = before > -math.inf
    assert torch.equal(kept > -math.inf, alive)
    assert ((kept - before)[alive].abs() < 1e-9).all()  # the mean weight never changes
    parents = log_w.gather(1, ancestors)
    assert (
        (parents > -math.inf) | (after == -math.inf) | ~alive.unsqueeze(1)
    ).all()  # the dead have no living children


@pytest.mark.parametrize("name", LOW_VARIANCE)
def test_equal_weights_leave_everyone_in_place(name: str) -> None:
    ancestors, after = RESAMPLERS[name](torch.full((3, 8), -2.0, dtype=torch.float64), seeded())
    assert torch.equal(ancestors, torch.arange(8).expand(3, 8))
    assert (after + 2).abs().max() < 1e-12


def test_partial_leaves_the_middle_alone() -> None:
    log_w = torch.tensor([[0.0, 5.0, 1.0, 2.0, -3.0, 1.5, 0.5, 0.9]], dtype=torch.float64)
    ancestors, after = ts.resampling.partial(ts.resampling.multinomial, 0.5)(log_w, seeded())
    chosen = [0, 1, 3, 4]  # the two lightest and the two heaviest
    middle = [i for i in range(8) if i not in chosen]
    assert ancestors[0, middle].tolist() == middle
    assert torch.equal(after[0, middle], log_w[0, middle])
    assert set(ancestors[0, chosen].tolist()) <= set(chosen)
    assert (after[0, chosen] - log_mean_weight(log_w[0, chosen])).abs().max() < 1e-12


def test_populations_do_not_touch_each_other() -> None:
    log_w = torch.randn(5, 6, generator=seeded(2), dtype=torch.float64)
    for name in RESAMPLERS:
        moved = log_w.clone()
        moved[2] = torch.randn(6, generator=seeded(9), dtype=torch.float64)
        a, b = (RESAMPLERS[name](w, seeded())[0] for w in (log_w, moved))
        others = [0, 1, 3, 4]
        assert torch.equal(a[others], b[others]), name


def test_ess() -> None:
    log_w = torch.tensor([[0.0, 0.0, 0.0, 0.0], [7.0, -math.inf, -math.inf, -math.inf], [-math.inf] * 4])
    assert torch.allclose(ts.resampling.ess(log_w), torch.tensor([4.0, 1.0, 0.0]))
    assert ts.resampling.ess(torch.tensor([[0.0, math.nan], [math.inf, 0.0]])).isnan().all()  # which is not to be dead


def test_triggers() -> None:
    log_w = torch.tensor([[0.0, 0.0], [0.0, -9.0]])
    steps = ts.uniform_steps(6)
    assert [bool(ts.triggers.every(2)(log_w, s)[0]) for s in steps] == [False, False, True, False, True, False]
    low = ts.triggers.ess_below(0.9)
    assert low(log_w, steps[0]).tolist() == [False, True]
    assert ts.triggers.all_of(low, ts.triggers.every(2))(log_w, steps[2]).tolist() == [False, True]
    assert ts.triggers.all_of(low, ts.triggers.every(2))(log_w, steps[1]).tolist() == [False, False]
    assert ts.triggers.any_of(low, ts.triggers.every(2))(log_w, steps[2]).tolist() == [True, True]
    assert ts.triggers.always(log_w, steps[0]).tolist() == [True, True]
    assert ts.triggers.never(log_w, steps[0]).tolist() == [False, False]


@pytest.mark.parametrize(
    "broken",
    [
        lambda: ts.triggers.every(0),
        lambda: ts.triggers.ess_below(0.0),
        lambda: ts.triggers.ess_below(1.5),
        lambda: ts.resampling.partial(ts.resampling.ssp, 0.0),
        lambda: ts.resampling.islands(0),
        lambda: ts.resampling.islands(2, fraction=1.5),
    ],
)
def test_bad_settings_are_refused(broken) -> None:
    with pytest.raises(ValueError, match="must"):
        broken()


def test_groups_must_divide() -> None:
    with pytest.raises(ValueError, match="groups of 3"):
        ts.resampling.nested(ts.resampling.systematic, 3)(torch.zeros(1, 8), None)
