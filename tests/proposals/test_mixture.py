"""Mixtures of proposals over whole transitions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from checks import answer, trial
from narrow import some
from toys import Toy, seeded

import tokensteer as ts
from tokensteer.testing import assert_proposal

A, B = Toy("A"), Toy("B")
MEMBERS = (ts.FromModel(), ts.Gradient(clip=2.0, tokens_only=True))


def steering(sampler: str, proposal: ts.Proposal) -> ts.Steering:
    return ts.Steering(B.model(sampler), B.tilt(sampler), proposal)


@pytest.mark.parametrize("sampler", ["mdm", "remdm", "lowconf"])
def test_the_probability_is_the_sum_of_the_members(sampler: str) -> None:
    path = steering(sampler, ts.Mixture(MEMBERS, (1.0, 3.0)))
    step, x = path.steps[0], path.start(64, None)
    evaluation = path.evaluate(x, step.t, None)
    q = path.propose(x, evaluation, step)
    y = q.sample(seeded())
    parts = [member(x, evaluation, step, path.model, path.twist).log_prob(y).exp() for member in MEMBERS]
    assert torch.allclose(q.log_prob(y).exp(), 0.25 * parts[0] + 0.75 * parts[1], atol=1e-12)
    ratio = path.log_ratio(y, x, evaluation, step, q)
    assert ratio.max() <= math.log(4.0) + 1e-9  # the model has a quarter, so no weight is multiplied by more than four


@pytest.mark.fast
@pytest.mark.parametrize("sampler", ["mdm", "remdm", "lowconf"])
def test_it_samples_what_it_evaluates(sampler: str) -> None:
    assert_proposal(steering(sampler, ts.Mixture(MEMBERS)), rows=8)


@pytest.mark.parametrize("sampler", ["mdm", "remdm"])
def test_weights_are_unbiased(sampler: str) -> None:
    tilt = ts.Tilt(B.reward, 2.0, draws=2)
    path = ts.Steering(B.model(sampler), tilt, ts.Mixture((ts.FromModel(), ts.Gradient(clip=1.0))))
    found = trial(path, answer(path.model, tilt), 4, 4096, 0)
    assert found.unbiased, found


def test_scale_multiplies_the_gradient() -> None:
    """With scale 0 the proposal is the model, and kl/2 is a scale of two."""
    x, generator = B.model("mdm").start(32, None), seeded()
    paths = [steering("mdm", ts.Gradient(scale=scale)) for scale in (0.0, 2.0)]
    step = paths[0].steps[0]
    measures = [some(path).propose(x, path.evaluate(x, step.t, generator), step) for path in paths]
    model = steering("mdm", ts.FromModel())
    plain = model.propose(x, model.evaluate(x, step.t, generator), step)
    y = measures[1].sample(generator)
    assert torch.allclose(measures[0].log_prob(y), plain.log_prob(y))
    assert not torch.allclose(measures[1].log_prob(y), plain.log_prob(y))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ts.Mixture(()), "two or more"),
        (lambda: ts.Mixture(MEMBERS, (1.0,)), "a share to each"),
        (lambda: ts.Mixture(MEMBERS, (1.0, 0.0)), "leave out"),
        (lambda: ts.Gradient(scale=-1.0), "Gradient.scale"),
        (lambda: steering("mdm", ts.Mixture((ts.Gradient(every=2), ts.Gradient()))), "one gradient"),
        (lambda: steering("mdm", ts.Mixture((B.amortised(), A.amortised()))), "one network"),
    ],
)
def test_errors_say_what_to_do(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()
