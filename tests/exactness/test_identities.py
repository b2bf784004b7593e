"""Structural identities I1-I10: what every run must satisfy, whatever the numbers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from narrow import untyped
from torch import Tensor
from toys import Toy, multilinear

import tokensteer as ts
from tokensteer.core.categorical.forms import LogProbs
from tokensteer.core.models.prediction import Prediction
from tokensteer.testing import enumerate_steering

pytestmark = pytest.mark.fast

SAMPLERS = ["mdm", "remdm", "lowconf"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def proposals(toy: Toy) -> dict[str, ts.Proposal]:
    return {"base": ts.FromModel(), "gradient": ts.Gradient(), "optimal": ts.Enumerated(), "learned": toy.amortised()}


@pytest.mark.parametrize("proposal", ["base", "gradient", "optimal", "learned"])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_i1_weights_telescope_along_lineages(sampler: str, proposal: str, dtype: torch.dtype, tolerance: float) -> None:
    toy = Toy("B", dtype)
    steering = ts.Steering(toy.model(sampler), toy.tilt(sampler), proposals(toy)[proposal])
    records = list(
        ts.sweep(steering, 16, 8, resample=ts.resampling.multinomial, when=ts.triggers.always, generator=seeded())
    )
    index = torch.arange(16).expand(8, 16)
    summed, ratio = torch.zeros(8, 16, dtype=torch.float64), torch.zeros(8, 16, dtype=torch.float64)
    for record in reversed(records[1:]):
        summed = summed + record.log_increment.gather(1, index)
        index = record.ancestors.gather(1, index)
    index = torch.arange(16).expand(8, 16)
    for before, record in reversed(list(itertools.pairwise(records))):
        step = record.step
        assert step is not None
        y = record.x.gather(1, index.unsqueeze(-1).expand_as(record.x))
        index = record.ancestors.gather(1, index)
        rows = (index + 16 * torch.arange(8).unsqueeze(-1)).flatten()
        x, evaluation = before.x.flatten(0, 1)[rows], before.evaluation.take(rows)
        q = steering.propose(x, evaluation, step)
        ratio = ratio + steering.log_ratio(y.flatten(0, 1), x, evaluation, step, q).double().view(8, 16)
    final = records[-1].evaluation.log_twist.double().view(8, 16)
    first = records[0].evaluation.log_twist.double()[rows].view(8, 16)
    assert (summed - (final - first + ratio)).abs().max() < tolerance


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_i2_base_proposal_weighs_by_the_twist_alone(sampler: str) -> None:
    toy = Toy("B")
    records = list(ts.sweep(ts.Steering(toy.model(sampler), toy.tilt(sampler)), 32, 4, generator=seeded()))
    for before, record in itertools.pairwise(records):
        rows = (record.ancestors + 32 * torch.arange(4).unsqueeze(-1)).flatten()
        change = record.evaluation.log_twist - before.evaluation.log_twist[rows]
        assert torch.equal(record.log_increment.flatten(), change)
    nothing = ts.Tilt(lambda x: torch.zeros(len(x), dtype=torch.float64), draws=2)
    for n in (1, 3, 16):
        result = ts.smc(ts.Steering(toy.model(sampler), nothing), n, 2, when=ts.triggers.always, generator=seeded())
        assert torch.equal(result.log_z, torch.zeros(2, dtype=torch.float64))
        assert torch.equal(result.log_w, torch.zeros(2, n, dtype=torch.float64))


@pytest.mark.parametrize("proposal", ["base", "gradient", "optimal", "learned"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_i3_a_constant_in_the_reward_shifts_log_z(sampler: str, proposal: str) -> None:
    toy, shift = Toy("A"), 1.7
    moved = multilinear(toy.soft_reward + shift, toy.tokens + 1, toy.length)
    tilts = [
        toy.tilt(sampler),
        ts.Tilt(lambda x: toy.reward(x) + shift, toy.kl, ramp=toy.ramp(sampler), estimator=ts.Value(moved)),
    ]
    runs = [
        ts.smc(ts.Steering(toy.model(sampler), tilt, proposals(toy)[proposal]), 8, 16, generator=seeded(1))
        for tilt in tilts
    ]
    assert torch.equal(runs[0].samples, runs[1].samples)
    assert (runs[1].log_z - runs[0].log_z - shift / toy.kl).abs().max() < 1e-10


@pytest.mark.parametrize("average", [ts.estimators.log_mean_exp, ts.estimators.mean])
def test_i3_with_carried_draws(average: ts.core.twists.estimators.Average) -> None:
    toy, shift = Toy("A"), -0.9
    runs = [
        ts.smc(
            ts.Steering(toy.model("mdm"), ts.Tilt(lambda x, c=c: toy.reward(x) + c, toy.kl, draws=2, average=average)),
            8,
            16,
            generator=seeded(1),
        )
        for c in (0.0, shift)
    ]
    assert (runs[1].log_z - runs[0].log_z - shift / toy.kl).abs().max() < 1e-10


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("target", ["tilt", "product", "product+tilt"])
def test_i4_optimal_weights_depend_on_x_t_alone(sampler: str, target: str) -> None:
    toy = Toy("B")
    model = toy.model(sampler) if target == "tilt" else toy.product(sampler, 1.5, -0.5, correct_remasking=False)
    choices = [ts.Enumerated()] + ([ts.Optimal()] if target == "product" else [])
    for q in choices:
        exact = enumerate_steering(ts.Steering(model, toy.tilt(sampler) if "tilt" in target else None, q))
        for index, moves in enumerate(exact.moves):
            increment = exact.log_increment(index)
            for state in moves.row.unique():
                mine = increment[moves.row == state]
                assert mine.max() - mine.min() < 1e-10


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_enumeration_knows_proposals_and_where_they_lead(sampler: str) -> None:
    toy = Toy("B")
    exact = enumerate_steering(ts.Steering(toy.model(sampler), toy.tilt(sampler), ts.Enumerated()))
    for index, moves in enumerate(exact.moves):
        assert (exact.log_optimal(index) - moves.log_q).exp().sub(1).abs().max() < 1e-10
    learned = ts.Steering(toy.model(sampler), toy.tilt(sampler), toy.amortised())
    law = enumerate_steering(learned).log_proposed()[-1].exp()
    result = ts.smc(learned, 20_000, when=ts.triggers.never, generator=seeded(5))
    share = (result.samples[0].unsqueeze(1) == toy.states).all(-1).double().mean(0)
    error = (law * (1 - law) / 20_000).sqrt()
    assert ((share - law).abs() <= 4.5 * error + 1e-12).all()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_i5_the_soft_value_as_twist_makes_all_weights_equal(sampler: str) -> None:
    toy = Toy("B")
    model = toy.model(sampler)
    exact = enumerate_steering(ts.Steering(model, toy.tilt(sampler)))
    num_steps = len(model.steps)
    # psi_t = ramp(t)/kl · r_hat = log V_t with a ramp of one; at the end r_hat is the reward itself.
    tables = [multilinear(v * toy.kl, toy.tokens + 1, toy.length) for v in exact.log_value]
    value = ts.Value(lambda x, t: tables[num_steps - round(t * num_steps)](x))
    tilt = ts.Tilt(toy.reward, toy.kl, ramp=ts.ramps.constant, estimator=value)
    steering = ts.Steering(model, tilt, ts.Enumerated())
    for index, record in enumerate(ts.sweep(steering, 64, 2, when=ts.triggers.always, generator=seeded())):
        if index:
            assert record.log_increment.abs().max() < 1e-10
    assert (record.log_z - exact.log_z).abs().max() < 1e-10


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_i6_trivial_products(sampler: str) -> None:
    # The path measure: the corrected one opens sites given those open in both states, so it is no longer the model's
    # own chain when a site is remasked beside them, though its Z is still 1.
    toy = Toy("B")
    one = toy.product(sampler, 1.0, 0.0, correct_remasking=False)
    result = ts.smc(ts.Steering(one), 16, 4, when=ts.triggers.always, generator=seeded())
    assert result.log_w.abs().max() < 1e-12
    plain = ts.smc(ts.Steering(toy.model(sampler)), 16, 4, when=ts.triggers.always, generator=seeded())
    assert torch.equal(result.samples, plain.samples)
    options = {"correct_remasking": False}
    tables = [
        enumerate_steering(ts.Steering(toy.product(sampler, 1.5, -0.5, convention=c, **options))).log_law
        for c in (ts.denoiser_powers, ts.kernel_powers, ts.paper_powers)
    ]
    # Opening in one move what the forward process masked bit by bit costs the paper's Z nothing when powers sum to 1.
    for other in tables[1:]:
        assert (tables[0].exp() - other.exp()).abs().max() < 1e-12
    assert abs(enumerate_steering(ts.Steering(toy.product(sampler, 1.0, 0.0))).log_z) < 1e-12


@dataclass(frozen=True)
class Offset:
    """The gradient proposal with a constant added to the gradient at each site."""

    offset: Tensor
    tokens_only: bool = False
    needs_gradient: bool = True
    meters: tuple[()] = ()

    def __call__(self, x: Tensor, evaluation: ts.Evaluation, step: ts.Step, model: ts.Model, twist: ts.Tilt | None):
        slope = untyped(evaluation.gradient).laws().dense() + self.offset.unsqueeze(-1)
        sites = torch.arange(x.numel()).view_as(x)
        moved = replace(evaluation, gradient=Prediction(x, sites, (LogProbs(slope.flatten(0, 1)),)))
        return ts.Gradient(tokens_only=self.tokens_only)(x, moved, step, model, twist)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("tokens_only", [False, True])
def test_i7_an_offset_of_the_gradient_leaves_q_alone(sampler: str, tokens_only: bool) -> None:
    toy = Toy("B")
    q = [
        enumerate_steering(ts.Steering(toy.model(sampler), toy.tilt(sampler), Offset(offset, tokens_only))).moves
        for offset in (torch.zeros(3, dtype=torch.float64), torch.tensor([3.0, -1.0, 0.5], dtype=torch.float64))
    ]
    for ours, theirs in zip(*q, strict=True):
        assert (ours.log_q - theirs.log_q).exp().sub(1).abs().max() < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "average", [ts.estimators.log_mean_exp, ts.estimators.log_mean_exp_outside, ts.estimators.mean]
)
@pytest.mark.parametrize("estimator", [ts.Sampled(), ts.Exact()])
@pytest.mark.parametrize("draws", [1, 3, 7])
def test_i8_clean_sequences_are_worth_their_reward(dtype, average, estimator, draws) -> None:
    toy = Toy("B", dtype)
    tilt = ts.Tilt(toy.reward, toy.kl, draws=draws, average=average, estimator=estimator)
    log_x0 = toy.model("mdm").predict(toy.clean, 0.5).laws()
    estimate = tilt.estimate(ts.NoisyState(toy.clean, log_x0, 0.5, toy.mask_id), seeded())
    assert torch.equal(estimate, toy.reward(toy.clean))


def test_i9_remasking_with_sigma_zero_is_ancestral() -> None:
    toy = Toy("B")
    model = toy.model("mdm")
    ancestral = toy.kernels["mdm"]
    assert isinstance(ancestral, ts.Ancestral)
    laws = [
        enumerate_steering(ts.Steering(replace(model, kernel=replace(ancestral, sigma=sigma)))).log_law
        for sigma in (ts.no_remasking, ts.Cap(0.0), lambda step, bound: 0.0 if step.index else 0.6)
    ]
    assert torch.equal(laws[0], laws[1])  # sigma = 0
    assert torch.equal(laws[0], laws[2])  # sigma at the first step: nothing is open yet


def expected_measure(steering: ts.Steering) -> Tensor:
    """E[Z_hat · W_hat(x_0)] for two particles resampled at every step, summed over every random choice."""
    exact = enumerate_steering(steering)
    size = len(exact.states)
    start = exact.log_law[0].exp() * exact.log_twist[0].exp()
    pair = torch.diag(start)  # measure on pairs of parents, weighted by the Z_hat gathered so far
    for index, moves in enumerate(exact.moves):
        q, g = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, size, dtype=torch.float64)
        q[moves.row, moves.column] = moves.log_q.exp()
        g[moves.row, moves.column] = exact.log_increment(index).exp()
        log_lookahead = torch.einsum("ab,ay,bz->abyz", pair, q, q)
        g1, g2 = g[:, None, :, None], g[None, :, None, :]
        if index == len(exact.moves) - 1:
            return 0.5 * ((log_lookahead * g1).sum((0, 1, 3)) + (log_lookahead * g2).sum((0, 1, 2)))
        # Mean weight (g1 + g2)/2 times the chance that the two children pick (1, 1), (2, 2), (1, 2) or (2, 1).
        base = log_lookahead / (2 * (g1 + g2)).clamp(min=1e-300)
        mixed = (base * g1 * g2).sum((0, 1))
        pair = torch.diag((base * g1 * g1).sum((0, 1, 3)) + (base * g2 * g2).sum((0, 1, 2))) + mixed + mixed.T
    raise AssertionError("a path has at least one step")


def combinations() -> list[tuple[str, str, str]]:
    tilted = ["base", "gradient", "optimal", "learned"]
    products = ["base", "cfg", "optimal"]
    return [
        (sampler, target, q)
        for sampler in SAMPLERS
        for target, choices in (("tilt", tilted), ("product", products), ("product+tilt", [*products, "gradient"]))
        for q in choices
    ]


@pytest.mark.parametrize(("sampler", "target", "proposal"), combinations())
def test_i10_two_particles_are_unbiased_exactly(sampler: str, target: str, proposal: str) -> None:
    toy = Toy("A")
    model = toy.model(sampler) if target == "tilt" else toy.product(sampler, 1.5, -0.5, correct_remasking=False)
    guided = {"cfg": ts.Guided(), "gradient": ts.Gradient(base=ts.Guided())} if target != "tilt" else {}
    q = {**proposals(toy), **guided}[proposal]
    steering = ts.Steering(model, toy.tilt(sampler) if "tilt" in target else None, q)
    exact = enumerate_steering(steering)
    truth = (exact.log_law[-1] + exact.log_twist[-1]).exp()
    assert (expected_measure(steering) - truth).abs().max() < 1e-12
