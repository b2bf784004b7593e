"""The guided sampler as a model, against enumeration: its tokens, its target, and how it differs from the product."""

from __future__ import annotations

import itertools
from dataclasses import replace

import labelled_toys as toy
import pytest
import torch
from torch import Tensor

import tokensteer as ts
from tokensteer.testing import TableDenoiser, enumerate_steering

SCALE = 1.7


def pair(*labels: int) -> tuple[ts.Diffusion, ts.Diffusion]:
    conditional = toy.model(*labels)
    return conditional, replace(conditional, context=torch.tensor([toy.NO_CLASS]))


def by_hand(x: Tensor, label: int) -> Tensor:
    """mu_g of one row (L,), (L, V - 1)."""
    logits = [toy.NET(x.unsqueeze(0), torch.tensor([c]))[0, :, : toy.CODES] for c in (label, toy.NO_CLASS)]
    powers = SCALE * logits[0].log_softmax(-1) + (1 - SCALE) * logits[1].log_softmax(-1)
    return powers.softmax(-1)


def exact_law(label: int) -> Tensor:
    """The distribution of the sampler's samples, (V - 1, V - 1): its steps by hand, site by site."""
    steps = toy.model(label).steps
    law = {(toy.MASK,) * toy.SITES: 1.0}
    for step in steps:
        opens, after = 1 - step.s / step.t, dict[tuple[int, ...], float]()
        for state, p in law.items():
            mu = by_hand(torch.tensor(state), label)
            choices: list[list[tuple[int, float]]] = []
            for site, token in enumerate(state):
                moved = [(v, opens * float(mu[site, v])) for v in range(toy.CODES)] + [(toy.MASK, 1 - opens)]
                choices.append([(token, 1.0)] if token != toy.MASK else moved)
            for chosen in itertools.product(*choices):
                there, q = tuple(token for token, _ in chosen), p
                for _, share in chosen:
                    q *= share
                after[there] = after.get(there, 0.0) + q
        law = after
    table = torch.zeros(toy.CODES, toy.CODES, dtype=torch.float64)
    for state, p in law.items():
        if toy.MASK not in state:
            table[state] = p
    return table


@pytest.mark.parametrize("label", range(toy.CLASSES))
def test_its_samples_have_the_distribution_of_the_guided_sampler(label: int):
    reference = ts.guided_reference(*pair(label), SCALE)
    found = enumerate_steering(ts.Steering(reference))
    expected = exact_law(label)
    assert float(expected.sum()) == pytest.approx(1.0)
    torch.testing.assert_close(found.target, expected.flatten())
    product = enumerate_steering(ts.Steering(ts.guided(*pair(label), SCALE)))
    assert float((product.target - found.target).abs().sum()) > 0.01  # another distribution


@pytest.mark.parametrize("proposal", [ts.FromModel(), ts.Gradient(clip=1.0)])
def test_a_tilt_of_it_has_its_own_target(proposal: ts.Proposal):
    """Z of p_g · exp(r/kl) for each label among others, within four standard errors of the sum by hand."""
    labels, each = (1, 0, 2), 40
    steering = ts.Steering(ts.guided_reference(*pair(*labels), SCALE), toy.TILT, proposal)
    assert steering.model.populations == 3
    result = ts.smc(steering, 32, 3 * each, generator=torch.Generator().manual_seed(4))
    samples = torch.cartesian_prod(torch.arange(toy.CODES), torch.arange(toy.CODES))
    for label, log_z in zip(labels, result.log_z.view(3, each), strict=True):
        p = exact_law(label)[samples[:, 0], samples[:, 1]]
        exact = (p * (toy.reward(samples) / toy.TILT.kl).exp()).sum().log()
        ratio = (log_z - exact).exp()
        assert abs(float(ratio.mean()) - 1) < 4 * float(ratio.std()) / each**0.5


def test_scale_one_is_the_conditional_model():
    conditional, other = pair(1)
    assert ts.guided_reference(conditional, other, 1.0) is conditional


def test_a_product_of_scale_one_runs_one_network():
    """For half the rows it has the same samples and weights, and the same target by enumeration."""
    for labels in ((1,), (1, 0, 2)):
        conditional, other = pair(*labels)
        alone, both = ts.guided(conditional, other, 1.0), ts.Product((conditional, other), (1.0, 0.0))
        assert alone.networks == (conditional,)
        one, two = (
            ts.smc(ts.Steering(model, toy.TILT, ts.Guided()), 8, 6, generator=torch.Generator().manual_seed(0))
            for model in (alone, both)
        )
        assert torch.equal(one.samples, two.samples)
        assert torch.equal(one.log_w, two.log_w)
        assert 2 * one.rows["denoiser"] == two.rows["denoiser"]
    exact = enumerate_steering(ts.Steering(ts.guided(*pair(1), 1.0), toy.TILT, ts.Guided()))
    torch.testing.assert_close(exact.target, enumerate_steering(ts.Steering(pair(1)[0], toy.TILT)).target)
    negative = replace(other, context=torch.tensor([0, 1]))  # the populations are counted by these contexts
    assert ts.guided(pair(1)[0], negative, 1.0).populations == 2


def test_denoisers_that_return_log_probabilities_are_guided_too():
    """A table model has -inf at the mask, and tokens without mass, which stay without."""
    table = torch.tensor([[0.5, 0.0], [0.2, 0.3]], dtype=torch.float64)
    even = torch.full((2, 2), 0.25, dtype=torch.float64)
    one, other = (
        ts.Diffusion(TableDenoiser(t), ts.Ancestral(2), ts.uniform_steps(2), ts.template(2, 2)) for t in (table, even)
    )
    reference = ts.guided_reference(one, other, 2.0)
    x = torch.tensor([[0, 2], [2, 2]])
    log_p = reference.denoiser(x, 0.5)
    assert log_p[0, 1].exp().tolist() == pytest.approx([1.0, 0.0, 0.0])
    expected = torch.tensor([0.5, 0.5]).square() / 0.5
    torch.testing.assert_close(log_p[1, 0, :2].exp().float(), expected / expected.sum())
    assert not log_p.isnan().any()


def test_models_that_do_not_fit_are_refused():
    conditional, other = pair(0, 1)
    with pytest.raises(ValueError, match="contexts of 2 and 3 rows"):
        ts.guided_reference(conditional, replace(other, context=torch.tensor([0, 1, 2])), 2.0)
    with pytest.raises(ValueError, match="scale"):
        ts.guided_reference(conditional, other, 0.0)
    three = ts.Diffusion(
        ts.from_logits(lambda x: torch.zeros(*x.shape, 3), 2, ignores_time=True),
        ts.Ancestral(2),
        ts.uniform_steps(2),
        ts.template(2, 2),
    )
    with pytest.raises(ValueError, match="vocabulary or mask"):
        ts.guided_reference(conditional, three, 2.0)
