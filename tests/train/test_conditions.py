"""Proposals of models with a condition for each population: one network learns them all."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from labelled_toys import CLASSES, MASK, NET, TILT, model
from torch import nn

import tokensteer as ts
from tokensteer.testing import enumerate_steering
from tokensteer.train import Likelihood, PathVariance, ProposalPlan, fit_proposal
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


def test_one_proposal_learns_all_labels():
    """Weights become more even for every label, and their means stay right."""
    path = ts.Steering(model(*LABELS), TILT)
    plan = ProposalPlan(120, paths=EACH * CLASSES, rate=0.02, warmup=0.0, average=0.9)
    net = copy.deepcopy(NET).requires_grad_(True)
    learned = fit_proposal(path, net, denoiser_of, plan=plan, generator=seeded(), objective=PathVariance())
    found = {}
    for name, proposal in (("model", ts.FromModel()), ("learned", ts.Amortised(learned.denoiser))):
        run = ts.Method(replace(path, proposal=proposal), when=ts.triggers.never)
        found[name] = run(2000, CLASSES, generator=seeded(1))
    share = {name: result.ess[-1] / 2000 for name, result in found.items()}
    assert (1 - share["learned"] < 0.5 * (1 - share["model"])).all()
    for k, label in enumerate(LABELS):
        exact = enumerate_steering(ts.Steering(model(label), TILT)).log_z
        error = (1 / share["learned"][k] - 1).sqrt() / 2000**0.5
        assert abs(found["learned"].log_z[k] - exact) < 4 * error


def test_likelihood_is_refused():
    path, plan = ts.Steering(model(*LABELS), TILT), ProposalPlan(2, paths=EACH * CLASSES)
    with pytest.raises(ValueError, match="does not give the network a context"):
        fit_proposal(path, other_net(), denoiser_of, plan=plan, generator=seeded(), objective=Likelihood())
