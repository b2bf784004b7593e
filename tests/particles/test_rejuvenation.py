"""Rejuvenation changes states and no weight: the target and Z stay what they are, for every kernel and twist."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checks import answer, trial
from toys import Toy, seeded

import tokensteer as ts

RANDOM, LESS_RANDOM = ({"estimator": ts.Sampled(), "draws": draws} for draws in (2, 8))
MAXIMUM = {"potential": ts.potentials.maximum}
ALWAYS, SOMETIMES, NEVER = ts.triggers.always, ts.triggers.ess_below(0.5), ts.triggers.never


def steering(sampler: str, twist: dict, proposal: ts.Proposal | None = None) -> ts.Steering:
    """With a gentler tilt than the toy's, which leaves hardly anything but its best sequence."""
    toy = Toy("B")
    tilt = replace(toy.tilt(sampler), kl=3.0, **twist)
    return ts.Steering(toy.model(sampler), tilt, proposal or ts.FromModel())


@pytest.mark.parametrize(
    ("sampler", "twist", "proposal", "back", "when"),
    [
        ("mdm", {}, ts.FromModel(), 2, SOMETIMES),
        ("mdm", RANDOM, ts.FromModel(), 2, NEVER),
        pytest.param("mdm", RANDOM, ts.FromModel(), 1, ALWAYS, marks=pytest.mark.slow),
        pytest.param("mdm", {}, ts.Gradient(), 1, ALWAYS, marks=pytest.mark.slow),
        ("mdm", LESS_RANDOM, ts.Gradient(clip=1.0), 2, SOMETIMES),
        ("mdm", MAXIMUM, ts.FromModel(), 2, ts.triggers.every(2)),
        pytest.param("remdm", {}, ts.Gradient(), 2, SOMETIMES, marks=pytest.mark.slow),
        ("remdm", RANDOM, ts.FromModel(), 1, SOMETIMES),
        pytest.param("remdm", MAXIMUM, ts.FromModel(), 1, ALWAYS, marks=pytest.mark.slow),
        ("lowconf", {}, ts.FromModel(), 1, ALWAYS),
        pytest.param("lowconf", LESS_RANDOM, ts.Gradient(clip=1.0), 1, NEVER, marks=pytest.mark.slow),
    ],
)
def test_unbiased(sampler, twist, proposal, back: int, when) -> None:
    path = steering(sampler, twist, proposal)
    found = trial(ts.Rejuvenated(path, back, tries=2), answer(path.model, path.twist), populations=2500, when=when)
    assert found.unbiased, found


@pytest.mark.fast
def test_unbiased_by_many_small_populations() -> None:
    """One random draw at full weight: a chosen segment keeps its noise, and no weight changes by the choice."""
    path = steering("mdm", {"estimator": ts.Sampled(), "draws": 1, "ramp": ts.ramps.constant})
    found = trial(ts.Rejuvenated(path, 3, tries=3), answer(path.model, path.twist), 2, 8000, when=ts.triggers.observe)
    assert found.unbiased, found


def test_the_present_segment_counts_with_its_own_ratio() -> None:
    """A poor proposal: chosen by their twists alone, segments would follow q and not p."""
    path = steering("mdm", {}, Toy("B").amortised())
    found = trial(ts.Rejuvenated(path, 2, tries=3), answer(path.model, path.twist), 4, 8000, when=NEVER)
    assert found.unbiased, found


def test_a_product_of_models() -> None:
    toy = Toy("B")
    path = ts.Steering(toy.product("mdm", 1.5, -0.5, lookahead=True), replace(toy.tilt("mdm"), kl=2.0), ts.Guided())
    found = trial(ts.Rejuvenated(path, 2, tries=2), answer(path.model, path.twist), populations=2500)
    assert found.unbiased, found


@pytest.mark.parametrize(
    "kernel", [ts.MaskGIT(2, temperature=1.0), ts.ConfidenceRemask(ts.Ancestral(2, sigma=ts.Cap(0.3)))], ids=type
)
def test_a_memory_travels_with_its_segment(kernel: ts.Kernel) -> None:
    """Kernels with a memory cannot be enumerated: Z is compared with that of SMC without moves."""
    toy = Toy("A")
    model = replace(toy.model("mdm"), kernel=kernel, steps=ts.uniform_steps(4))
    path = ts.Steering(model, ts.Tilt(toy.reward, 2.0, draws=2))
    plain, moved = (
        ts.smc(p, 4, 6000, generator=seeded(k)).log_z.exp() for k, p in enumerate((path, ts.Rejuvenated(path, 2)))
    )
    error = (plain.var() / len(plain) + moved.var() / len(moved)).sqrt()
    assert abs((plain.mean() - moved.mean()) / error) < 4


def test_templates_keep_their_own_prompts() -> None:
    toy = Toy("B")
    canvas = torch.stack([ts.template(3, toy.mask_id, [token]) for token in (0, 1)])
    path = ts.Steering(replace(toy.model("mdm"), template=canvas), ts.Tilt(toy.reward, 2.0, draws=2))
    result = ts.smc(ts.Rejuvenated(path, 1, tries=3), 5, 4, generator=seeded())
    assert result.samples[..., 0].tolist() == [[0] * 5, [0] * 5, [1] * 5, [1] * 5]


def test_copies_differ_again() -> None:
    """All particles are copies of one; redrawn segments tell them apart, and cost what is documented."""
    toy = Toy("B")
    model = replace(toy.model("mdm"), sharing=False)
    path = ts.Steering(model, ts.Tilt(lambda x: torch.zeros(len(x)), ramp=ts.ramps.constant))

    def first_only(log_w, generator):
        return torch.zeros_like(log_w, dtype=torch.int64), log_w

    def distinct_samples(p: ts.FeynmanKac) -> tuple[float, int]:
        last = ts.triggers.Scheduled(ALWAYS, lambda step: step.index == 3)
        result = ts.smc(p, 16, 50, resample=first_only, when=last, generator=seeded(3))
        return sum(len(x.unique(dim=0)) for x in result.samples) / 50, result.rows["denoiser"]

    (plain, rows), (moved, more) = map(distinct_samples, (path, ts.Rejuvenated(path, 3, tries=2)))
    assert moved > 1.5 * plain
    assert rows == 16 * 50 * 4
    assert more == rows + 16 * 50 * 2 * 3  # one redraw of three steps, two tries


def test_a_nan_in_a_segment_raises() -> None:
    toy = Toy("A")

    def value(x: torch.Tensor, t: float) -> torch.Tensor:
        return torch.full((len(x),), torch.nan if len(x) == 12 else 0.0)

    path = ts.Steering(toy.model("mdm"), ts.Tilt(toy.reward, estimator=ts.Value(value)))
    with pytest.raises(FloatingPointError, match="weight of a segment"):
        ts.smc(ts.Rejuvenated(path, 1, tries=3), 4, generator=seeded())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"back": 0}, "back must be at least 1"),
        ({"back": 1, "tries": 0}, "tries must be at least 1"),
        ({"back": 2, "every": 1}, "every must be at least 2, got 1: segments of `back` steps must not overlap"),
        ({"back": 4}, "the path has 4 steps"),
    ],
)
def test_refused_with_the_reason(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ts.Rejuvenated(steering("mdm", {}), **options)


def test_adaptive_ramps_are_refused() -> None:
    path = steering("mdm", {"ramp": ts.Adaptive(0.5)})
    with pytest.raises(ValueError, match="adapted_ramp"):
        ts.smc(ts.Rejuvenated(path, 1), 4, generator=seeded())


def test_nested_moves_are_refused() -> None:
    with pytest.raises(TypeError, match="more `tries`"):
        ts.Rejuvenated(ts.Rejuvenated(steering("mdm", {}), 1), 1)
