"""Proposals of models with a condition for each population: one network learns them all."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from labelled_toys import CLASSES, MASK, NET, TILT, model
from torch import nn

import tokensteer as ts
from tokensteer.testing import enumerate_steering
from tokensteer.train import Likelihood, PathVariance, ProposalPlan, StepVariance, fit_proposal
from tokensteer.train.held_out import held_out
from tokensteer.train.paths import Transitions, walk

LABELS = tuple(range(CLASSES))
EACH = 16


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def other_net() -> nn.Module:
    """A copy that differs from the model's network, and can learn."""
    net = copy.deepcopy(NET).requires_grad_(True)
    with torch.no_grad():
        for k, weights in enumerate(net.parameters()):
            weights += 0.3 * torch.randn(weights.shape, generator=seeded(k), dtype=weights.dtype)
    return net


def denoiser_of(net: nn.Module) -> ts.Denoiser:
    return ts.from_logits(net, MASK, ignores_time=True)


def test_moves_have_the_probability_of_their_own_label():
    """log q of the paths of three labels together is that of each label alone."""
    together, q = model(*LABELS), denoiser_of(other_net())
    paths = walk(ts.Steering(together, TILT, ts.Amortised(q)), EACH * CLASSES, seeded())
    steps = range(paths.num_steps)
    found = Transitions(together, q, paths).log_q(steps)
    assert torch.allclose((paths.log_p - found), paths.log_ratio)  # as the sampler had it
    for k, label in enumerate(LABELS):
        own = slice(k * EACH, (k + 1) * EACH)
        alone = replace(paths, x=paths.x[:, own], log_p=paths.log_p[:, own])
        assert torch.allclose(Transitions(model(label), q, alone).log_q(steps), found[:, own])


PATHWISE = ProposalPlan(120, paths=EACH * CLASSES, rate=0.02, warmup=0.0, average=0.9)
SAMPLES = ProposalPlan(12, paths=256 * CLASSES, updates=40, replay=6, rate=0.02, warmup=0.0, average=0.98)


@pytest.mark.parametrize(
    ("objective", "plan", "left"),
    [(PathVariance(), PATHWISE, 0.5), (Likelihood(), SAMPLES, 0.65)],
    ids=["path variance", "likelihood"],
)
def test_one_proposal_learns_all_labels(objective, plan: ProposalPlan, left: float):
    """Weights become more even for every label, and their means stay right."""
    path = ts.Steering(model(*LABELS), TILT)
    net = copy.deepcopy(NET).requires_grad_(True)
    learned = fit_proposal(path, net, denoiser_of, plan=plan, generator=seeded(), objective=objective)
    found = {}
    for name, proposal in (("model", ts.FromModel()), ("learned", ts.Amortised(learned.denoiser))):
        run = ts.Method(replace(path, proposal=proposal), when=ts.triggers.never)
        found[name] = run(2000, CLASSES, generator=seeded(1))
    share = {name: result.ess[-1] / 2000 for name, result in found.items()}
    assert (1 - share["learned"] < left * (1 - share["model"])).all()
    for k, label in enumerate(LABELS):
        exact = enumerate_steering(ts.Steering(model(label), TILT)).log_z
        error = (1 / share["learned"][k] - 1).sqrt() / 2000**0.5
        assert abs(found["learned"].log_z[k] - exact) < 4 * error


@pytest.mark.parametrize(
    ("objective", "paths", "says"),
    [
        (StepVariance(), EACH * CLASSES, "does not tell 3 contexts apart"),
        (PathVariance(), 2 * CLASSES - 1, "let paths be 6 or more"),
    ],
)
def test_what_cannot_learn_is_refused(objective, paths: int, says: str):
    path, plan = ts.Steering(model(*LABELS), TILT), ProposalPlan(2, paths=paths)
    with pytest.raises(ValueError, match=says):
        fit_proposal(path, other_net(), denoiser_of, plan=plan, generator=seeded(), objective=objective)


def test_scores_do_not_mix_labels():
    """A reward that differs by label alone leaves all weights of a label equal."""
    worth = torch.tensor([0.0, 5.0, 50.0], dtype=torch.float64).unsqueeze(-1)
    tilt = ts.Tilt(lambda x, of: of[:, 0], 1.0, context=worth)
    path, plan = ts.Steering(model(*LABELS), tilt), ProposalPlan(2, paths=EACH * CLASSES, report_every=1)
    net = copy.deepcopy(NET).requires_grad_(True)
    learned = fit_proposal(path, net, denoiser_of, plan=plan, generator=seeded(), objective=PathVariance())
    assert learned.history[0].ess == pytest.approx(1.0, abs=1e-6)
    found = held_out(path, EACH * CLASSES, seeded())
    assert (found.ess, found.log_z) == pytest.approx((1.0, float(worth.mean())), abs=1e-6)
    assert found.error == pytest.approx(0.0, abs=1e-6)


def test_a_checkpoint_of_other_labels_is_refused(tmp_path: Path):
    plan = ProposalPlan(2, paths=EACH * CLASSES)
    for labels, goes in ((LABELS, True), (LABELS, True), ((2, 2, 0), False)):
        path, net = ts.Steering(model(*labels), TILT), copy.deepcopy(NET).requires_grad_(True)
        with contextlib.nullcontext() if goes else pytest.raises(ValueError, match="context"):
            fit_proposal(
                path,
                net,
                denoiser_of,
                plan=plan,
                generator=seeded(),
                objective=PathVariance(),
                checkpoint=tmp_path / "checkpoint",
            )
