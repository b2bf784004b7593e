"""Products that remask: the tokens of a step are drawn given the sites that are open before and after it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checks import POWERS, answer, trial
from toys import Toy, seeded

import tokensteer as ts
from tokensteer.core.kernels.masked import ConfidenceRemask
from tokensteer.core.kernels.measure import Reveal
from tokensteer.core.models.prediction import stored_prediction
from tokensteer.core.proposals.after_remasking import AfterRemasking
from tokensteer.testing import assert_proposal, enumerate_steering

B = Toy("B")
PROPOSALS = {
    "guided": ts.Guided(),
    "gradient": ts.Gradient(ts.Guided(), clip=1.0),
    "gradient of tokens": ts.Gradient(ts.Guided(), clip=1.0, tokens_only=True),
    "mixture": ts.Mixture((ts.Guided(), ts.FromModel())),
}


def steering(name: str) -> ts.Steering:
    tilt = B.tilt("remdm") if "gradient" in name else None
    return ts.Steering(B.product("remdm", *POWERS), tilt, PROPOSALS[name])


@pytest.mark.parametrize("name", PROPOSALS)
def test_it_samples_what_it_evaluates(name: str) -> None:
    assert_proposal(steering(name), rows=8)


@pytest.mark.parametrize("name", PROPOSALS)
def test_weights_are_unbiased(name: str) -> None:
    path = steering(name)
    found = trial(path, answer(path.model, path.twist), 4, 4096, 0)
    assert found.unbiased, found


def test_a_product_of_one_model_has_equal_weights() -> None:
    """Tokens that were drawn given all open sites had weights here, with an ESS/N of .70."""
    path = ts.Steering(B.product("remdm", 1.0, 0.0), None, ts.Guided())
    result = ts.smc(path, 64, 4, when=ts.triggers.never, generator=seeded())
    assert result.log_w.abs().max() < 1e-12


def test_weights_are_even() -> None:
    """As even as without remasking, .897; with tokens drawn given all open sites ESS/N was .27."""
    for sampler in ("mdm", "remdm"):
        path = ts.Steering(B.product(sampler, 1.5, -0.5), None, ts.Guided())
        result = ts.smc(path, 4096, 8, when=ts.triggers.never, generator=seeded())
        assert result.ess[-1].mean() / 4096 > 0.88


def asked_of(steering: ts.Steering) -> float:
    """Predictions of a run for each of 64 particles and each of two networks."""
    result = ts.smc(steering, 16, 4, when=ts.triggers.always, generator=seeded())
    return (result.rows["denoiser"] + result.saved["denoiser"]) / (2 * 64)


def test_a_step_predicts_once_for_the_sites_that_it_leaves() -> None:
    """And the start twice, the second time from what was predicted at first. What was predicted for the draw is not
    predicted again for the weight."""
    model = B.product("remdm", 1.5, -0.5)
    assert asked_of(ts.Steering(model, None, ts.Guided())) == len(model.steps) + 1


def test_a_step_predicts_twice_at_most() -> None:
    """Where a twist reads the prediction at x_t."""
    model = B.product("remdm", 1.5, -0.5)
    twice = sum(1 + model.corrects(step) for step in model.steps)
    assert asked_of(ts.Steering(replace(model, lookahead=True), None, ts.Guided())) == twice
    assert asked_of(ts.Steering(model, B.tilt("remdm"), ts.Guided())) == twice


def test_a_mixture_predicts_no_more_for_its_weight() -> None:
    """At x_t, for the draw of the member, and for what was drawn from the mixture; the weight uses the last."""
    model = B.product("remdm", 1.5, -0.5)
    path = ts.Steering(model, None, ts.Mixture((ts.FromModel(), ts.Guided())))
    assert asked_of(path) == len(model.steps) + 2 * sum(map(model.corrects, model.steps))
    x, generator = path.start(64, None), seeded()
    for step in path.steps:
        evaluation = path.evaluate(x, step.t, generator)
        q = path.propose(x, evaluation, step)
        y = q.sample(generator)
        own = model.log_prob(y, x, stored_prediction(evaluation), step, q.sites)
        assert torch.equal(path.log_p(y, x, evaluation, step, q), own)
        x = y


@pytest.mark.fast
def test_sites_that_are_not_given_are_chosen_at_x_t() -> None:
    """By confidence sites are masked again as the prediction at x_t has it, not as that of what they leave."""
    base = B.kernels["remdm"]
    assert isinstance(base, ts.Ancestral)
    kernel = ConfidenceRemask(base, sharpness=3.0, carried=False)
    model = ts.Product([replace(B.model("remdm", joint), kernel=kernel) for joint in ("p1", "p2")], POWERS)
    exact = enumerate_steering(ts.Steering(model, None, ts.Guided()))
    assert any(map(model.corrects, model.steps))
    for step, moves in zip(model.steps, exact.moves, strict=True):
        x, y = exact.states[moves.row], exact.states[moves.column]
        log_p = model.log_prob(y, x, model.predict(x, step.t), step, None)
        assert torch.allclose(log_p, moves.log_p, atol=1e-12)


def test_late_predictions_change_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    path = ts.Steering(B.product("remdm", 1.5, -0.5), None, ts.Guided())
    late = ts.smc(path, 16, 4, generator=seeded())
    monkeypatch.setattr(ts.Steering, "_predicts_late", lambda self, t: False)  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
    both = ts.smc(path, 16, 4, generator=seeded())
    assert torch.equal(late.samples, both.samples)
    assert torch.equal(late.log_w, both.log_w)


def test_tilts_add_up() -> None:
    path = ts.Steering(B.product("remdm", 1.5, -0.5), None, ts.Guided())
    x, generator = path.start(64, None), seeded()
    h = torch.randn(64, B.length, B.tokens + 1, generator=generator, dtype=torch.float64)
    for step in path.steps:
        q = path.propose(x, path.evaluate(x, step.t, generator), step)
        assert isinstance(q, AfterRemasking | Reveal)
        y = q.sample(generator)
        once, twice = q.tilt_tokens(2 * h), q.tilt_tokens(h).tilt_tokens(h)
        assert torch.allclose(once.log_prob(y), twice.log_prob(y), atol=1e-12)
        x = y


def test_a_state_that_was_not_drawn_is_predicted_once() -> None:
    """As that of a pinned particle: the prediction serves its weight and its probability."""
    model = B.product("remdm", 1.5, -0.5)
    path, meter = ts.Steering(model, None, ts.Guided()), model.models[0].meter
    x, generator = path.start(64, None), seeded()
    for step in path.steps:
        evaluation = path.evaluate(x, step.t, generator)
        q = path.propose(x, evaluation, step)
        other = q.sample(generator)
        before = meter.rows + meter.saved
        y = other.clone()
        ratio = path.log_p(y, x, evaluation, step, q) - q.log_prob(y)
        assert ratio.shape == (64,)
        assert meter.rows + meter.saved - before == 64 * model.corrects(step)
        x = other


def test_rows_that_are_taken_keep_their_tilt() -> None:
    path = steering("gradient of tokens")
    x, generator = path.start(64, None), seeded()
    for step in path.steps[:2]:
        evaluation = path.evaluate(x, step.t, generator)
        q = path.propose(x, evaluation, step)
        y, rows = q.sample(generator), torch.arange(0, 64, 3)
        assert torch.allclose(q.take(rows).log_prob(y[rows]), q.log_prob(y.clone())[rows], atol=1e-12)
        x = y
