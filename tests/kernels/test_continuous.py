"""Continuous time: golden case 17, exact laws by enumeration, orders of convergence, and samplers as z-scores."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from checks import Answer, trial
from torch import Tensor
from toys import Toy, case, numbers

import tokensteer as ts
from tokensteer.core.kernels import rates as ct
from tokensteer.testing import TableDenoiser, assert_kernel, enumerate_steering

torch.set_num_threads(1)

GOLDEN = case(17)
INPUTS, OUTPUTS = GOLDEN["inputs"], GOLDEN["outputs"]
TOY = Toy(GOLDEN["toy"])
START, END = INPUTS["t0"], INPUTS["s"]


# ---- the chain of golden case 17: R = mu/t, Q = R exp(c (h(y) - h(x))), psi = (1 - t) h, pi_t = p_t exp(psi_t)


def cell(x: Tensor) -> Tensor:
    return (x * (TOY.tokens + 1) ** torch.arange(TOY.length - 1, -1, -1)).sum(-1)


def h(x: Tensor) -> Tensor:
    return numbers(INPUTS["h_S"])[cell(x)]


def h_jumps(x: Tensor) -> Tensor:
    """h(x^{l:=v}) - h(x), (P, L, V)."""
    size = TOY.tokens + 1
    y = x.view(len(x), 1, 1, -1).repeat(1, TOY.length, size, 1)
    for site in range(TOY.length):
        y[:, site, :, site] = torch.arange(size)
    return h(y.flatten(0, 2)).view(len(x), TOY.length, size) - h(x).view(-1, 1, 1)


LOG_X0 = TableDenoiser(TOY.joint("p1"))(TOY.states, 0.5)
MU = torch.where((TOY.states == TOY.mask_id).unsqueeze(-1), LOG_X0.exp(), 0.0)
TILTED = MU * (INPUTS["c"] * h_jumps(TOY.states)).exp()  # Q without its hazard


def tilted(x: Tensor) -> Tensor:
    return TILTED[cell(x)]


def model_rate(x: Tensor, t: Tensor) -> Tensor:
    return ct.masked_rate(x, LOG_X0[cell(x)], t, ts.Linear(), TOY.mask_id)


def proposal_rate(x: Tensor, t: Tensor) -> Tensor:
    return tilted(x) / t.view(-1, 1, 1)


def log_twist(x: Tensor, t: Tensor) -> Tensor:
    return (1 - t) * h(x)


def log_pi(x: Tensor, t: Tensor) -> Tensor:
    joint = TOY.joint("p1")
    for site in range(TOY.length):  # the mask stands for the sum over tokens
        joint = torch.cat([joint, joint.sum(site, keepdim=True)], site)
    masked = (x == TOY.mask_id).sum(-1)
    log_p = joint.flatten()[cell(x)].log() + masked * t.log() + (TOY.length - masked) * (1 - t).log()
    return log_p + log_twist(x, t)


def weigh(paths: ts.testing.JumpPaths) -> dict[str, Tensor]:
    return {
        "log_w_I_detailed_balance_gamma": ts.testing.balance_log_weight(paths, proposal_rate, log_pi),
        "log_w_II_model_reversal_gamma": ts.testing.tilt_log_weight(paths, model_rate, proposal_rate, log_twist),
    }


def golden_paths() -> ts.testing.JumpPaths:
    """Padded to equal numbers of states."""
    most = max(len(path) for path in INPUTS["paths"])
    times = [[t for t, _ in path] + [END] * (most + 1 - len(path)) for path in INPUTS["paths"]]
    states = [[x for _, x in path] + [path[-1][1]] * (most - len(path)) for path in INPUTS["paths"]]
    return ts.testing.JumpPaths(numbers(times), torch.tensor(states))


def slope(sizes: list[int], errors: list[float]) -> float:
    """The order in 1/size, by least squares in log-log."""
    return -float(np.polyfit(np.log(sizes), np.log(errors), 1)[0])


def largest_z(estimates: Tensor, truth: Tensor) -> float:
    return float(((estimates.mean(0) - truth) / (estimates.std(0) / math.sqrt(len(estimates)))).abs().max())


@pytest.mark.parametrize("form", ["log_w_I_detailed_balance_gamma", "log_w_II_model_reversal_gamma"])
def test_golden_path_weights(form: str) -> None:
    ours = weigh(golden_paths())[form]
    assert (ours - numbers(OUTPUTS[form])).abs().max() < 1e-9


def start_law() -> Tensor:
    t = torch.full((len(TOY.states),), START, dtype=torch.float64)
    return log_pi(TOY.states, t).softmax(0)


def listed_paths(nodes: int = 16) -> tuple[ts.testing.JumpPaths, Tensor]:
    """Every order of jumps with Gauss-Legendre jump times (in log t), and the log-density of each under pi and Q."""
    z, w = np.polynomial.legendre.leggauss(nodes)
    span = math.log(START / END)
    u, du = torch.tensor((z + 1) / 2 * span), torch.tensor(w / 2 * span)  # u = log(START/t); Q in u is Q·t
    times: list[list[float]] = []
    states: list[Tensor] = []
    log_mass: list[float] = []

    def extend(x: Tensor, jumps: list[tuple[float, Tensor]], log_p: float, weight: float) -> None:
        """x is (1, L), the last state; jumps are (u, state after) so far; weight the quadrature's."""
        began = jumps[-1][0] if jumps else 0.0
        rates = tilted(x)[0]
        exit_rate = float(rates.sum())
        pad = TOY.length - len(jumps)
        times.append([START, *(START * math.exp(-v) for v, _ in jumps), *[END] * (pad + 1)])
        states.append(torch.cat([first, *(y for _, y in jumps), *[x] * pad]))
        log_mass.append(log_p - exit_rate * (span - began) + math.log(weight))
        share = 1 - began / span  # jump times in [began, span]
        for site, token in (rates > 0).nonzero().tolist():
            y = x.clone()
            y[0, site] = token
            for node, dv in zip(u.tolist(), du.tolist(), strict=True):
                v = began + node * share
                log_q = math.log(float(rates[site, token])) - exit_rate * (v - began)
                extend(y, [*jumps, (v, y)], log_p + log_q, weight * dv * share)

    for x, p in zip(TOY.states, start_law().tolist(), strict=True):
        first = x.unsqueeze(0)
        extend(first, [], math.log(p), 1.0)
    return ts.testing.JumpPaths(numbers(times), torch.stack(states)), torch.tensor(log_mass, dtype=torch.float64)


def test_golden_expectations_by_enumeration() -> None:
    """E_Q[w 1{x_s}] = pi_s / Z_t0 for both forms, over all paths: their masses times the library's weights."""
    paths, log_mass = listed_paths()
    end = cell(paths.states[:, -1])
    assert abs(float(log_mass.exp().sum()) - 1) < 1e-9
    for log_w in weigh(paths).values():
        masses = torch.zeros(len(TOY.states), dtype=torch.float64).index_add(0, end, (log_mass + log_w).exp())
        assert (masses - numbers(OUTPUTS["E_w_indicator_S"])).abs().max() < 1e-7
        assert abs(float(masses.sum()) - OUTPUTS["Z_ratio"]) < 1e-7


def test_golden_expectations_by_simulation() -> None:
    generator, count = torch.Generator().manual_seed(17), 5_000
    first = torch.multinomial(start_law(), count, True, generator=generator)
    paths = ts.testing.jump_paths(TOY.states[first], tilted, ts.Linear(), START, END, generator)
    arrived = torch.nn.functional.one_hot(cell(paths.states[:, -1]), len(TOY.states))
    for log_w in weigh(paths).values():
        w = log_w.exp().unsqueeze(-1)
        assert largest_z(w, numbers([OUTPUTS["Z_ratio"]])) < 4
        assert largest_z(w * arrived, numbers(OUTPUTS["E_w_indicator_S"])) < 4


def grid_log_weights(count: int) -> dict[str, Tensor]:
    """The discrete weights of the golden paths on a grid of `count` steps, with tau-leaps in place of the rates."""
    paths = golden_paths()
    grid = torch.linspace(START, END, count + 1, dtype=torch.float64)
    seen = (paths.times[:, 1:-1].unsqueeze(1) >= grid.view(1, -1, 1)).sum(-1)  # (P, count + 1): jumps so far
    x = paths.states.gather(1, seen.unsqueeze(-1).expand(-1, -1, TOY.length))
    here, there = x[:, :-1].flatten(0, 1), x[:, 1:].flatten(0, 1)
    t, s = grid[:-1].repeat(len(x)), grid[1:].repeat(len(x))
    noise = ts.testing.reversed_rate(proposal_rate, log_pi)
    span = (START - END) / count
    log_q = ts.jumps.leap(here, proposal_rate(here, t), span).log_prob(there)
    log_p = ts.jumps.leap(here, model_rate(here, t), span).log_prob(there)
    log_noise = ts.jumps.leap(there, noise(there, s), span).log_prob(here)
    first = log_noise - log_q + log_pi(there, s) - log_pi(here, t)
    second = log_p - log_q + log_twist(there, s) - log_twist(here, t)
    return {name: part.view(len(x), -1).sum(-1) for name, part in zip(weigh(paths), (first, second), strict=True)}


@pytest.mark.parametrize("form", ["log_w_I_detailed_balance_gamma", "log_w_II_model_reversal_gamma"])
def test_discrete_increments_converge_at_first_order(form: str) -> None:
    sizes = [80 * 2**k for k in range(7)]
    errors = [float((grid_log_weights(n)[form] - numbers(OUTPUTS[form])).abs().max()) for n in sizes]
    assert slope(sizes, errors) >= 0.9, (sizes, errors)


# ---- the uniform process


def uniform_toy(t: float) -> tuple[Tensor, Tensor, Tensor]:
    """All sequences of toy A, their marginal p_t under uniform noise, and log p(x_0^l | x_t), (S, L, V)."""
    x, p0, alpha = TOY.clean, TOY.joint("p1").flatten(), ts.Cosine().alpha(t)
    likely = alpha * (x.unsqueeze(1) == x.unsqueeze(0)).double() + (1 - alpha) / TOY.tokens  # (x_t, x_0, L)
    both = likely.prod(-1) * p0
    tokens = torch.nn.functional.one_hot(x, TOY.tokens).double()
    return x, both.sum(-1), (torch.einsum("ij,jlv->ilv", both, tokens) / both.sum(-1).view(-1, 1, 1)).log()


def generator_matrix(x: Tensor, rates: Tensor) -> Tensor:
    """(S, S) of rates from row to column, the diagonal minus their sum."""
    apart = x.unsqueeze(1) != x.unsqueeze(0)
    one = apart.sum(-1) == 1
    to = rates.unsqueeze(1).expand(-1, len(x), -1, -1).gather(-1, x.expand(len(x), *x.shape).unsqueeze(-1)).squeeze(-1)
    off = torch.where(one, torch.where(apart, to, 0.0).sum(-1), 0.0)
    return off - off.sum(-1).diag()


@pytest.mark.parametrize("t", [0.15, 0.5, 0.9])
def test_uniform_rates_carry_the_marginals(t: float) -> None:
    """Kolmogorov backwards in time: -dp_t/dt = p_t R_t."""
    x, p, log_x0 = uniform_toy(t)
    rates = ct.uniform_rate(x, log_x0, t, ts.Cosine())
    assert (rates.gather(-1, x.unsqueeze(-1)) == 0).all()
    flow = p @ generator_matrix(x, rates)
    change = (uniform_toy(t - 1e-5)[1] - uniform_toy(t + 1e-5)[1]) / 2e-5
    assert (flow - change).abs().max() < 1e-8
    rows = ct.uniform_rate(x, log_x0, torch.full((len(x),), t, dtype=torch.float64), ts.Cosine())
    assert torch.equal(rows, rates)


def test_masked_rates_carry_the_marginals() -> None:
    t, d = torch.full((len(TOY.states),), 0.4, dtype=torch.float64), 1e-5
    law = lambda t: (log_pi(TOY.states, t) - log_twist(TOY.states, t)).exp()  # noqa: E731
    flow = law(t) @ generator_matrix(TOY.states, model_rate(TOY.states, t))
    assert (flow - (law(t - d) - law(t + d)) / (2 * d)).abs().max() < 1e-8


def test_uniform_rates_are_the_limit_of_the_discrete_kernel() -> None:
    kernel, t = ts.uniform_noise(TOY.tokens, ts.Cosine()), 0.6
    x, _, log_x0 = uniform_toy(t)
    rates = ct.uniform_rate(x, log_x0, t, ts.Cosine())

    def error(n: int) -> float:
        p = kernel(x, log_x0, ts.Step(0, t, t - 1 / n)).dense().log_p.exp().scatter(-1, x.unsqueeze(-1), 0.0)
        return float((n * p - rates).abs().max())

    sizes = [100, 1000, 10_000]
    assert slope(sizes, [error(n) for n in sizes]) >= 0.9


def test_leaps_of_the_uniform_process_converge_at_first_order() -> None:
    start, end = 0.8, 0.2

    def error(count: int) -> float:
        span = (start - end) / count
        law = uniform_toy(start)[1]
        for i in range(count):
            t = start - i * span
            x, _, log_x0 = uniform_toy(t)
            table = ts.jumps.leap(x, ct.uniform_rate(x, log_x0, t, ts.Cosine()), span)
            moves = torch.stack([table.log_prob(y.expand_as(x)) for y in x], 1).exp()
            assert (moves.sum(1) - 1).abs().max() < 1e-12
            law = law @ moves
        return float((law - uniform_toy(end)[1]).abs().sum() / 2)

    sizes = [8, 16, 32, 64, 128]
    errors = [error(n) for n in sizes]
    assert slope(sizes, errors) >= 0.9, errors


# ---- tau-leaping of the masked process


def limit(toy: Toy, joint: str = "p1") -> Answer:
    """Continuous time with the exact denoiser: the data itself, tilted."""
    mass = toy.joint(joint).flatten() * (toy.reward(toy.clean) / toy.kl).exp()
    return Answer(math.log(float(mass.sum())), mass / mass.sum(), toy.clean)


def model(toy: Toy, kernel: Any, steps: Any) -> ts.Diffusion:
    canvas = ts.template(toy.length, toy.mask_id)
    return ts.Diffusion(TableDenoiser(toy.joint("p1")), kernel, steps, canvas)


@pytest.mark.parametrize(
    ("name", "schedule"), [("A", ts.Linear()), ("B", ts.Linear()), ("B", ts.Cosine()), ("A", ts.Polynomial(2.0))]
)
@pytest.mark.slow
def test_tau_leaping_converges_at_first_order(name: str, schedule: ts.Schedule) -> None:
    toy = Toy(name)
    truth = limit(toy)
    tilt = ts.Tilt(toy.reward, toy.kl, ramp=ts.ramps.end)
    sizes = [8, 16, 32, 64, 128]
    in_law: list[float] = []
    in_log_z: list[float] = []
    for n in sizes:
        leaps = model(toy, ts.TauLeap(toy.mask_id, schedule), ts.uniform_steps(n))
        exact = enumerate_steering(ts.Steering(leaps, tilt))
        in_law.append(float((exact.model_law - toy.joint("p1").flatten()).abs().sum() / 2))
        in_log_z.append(abs(exact.log_z - truth.log_z))
    assert slope(sizes, in_law) >= 0.9, in_law
    assert slope(sizes, in_log_z) >= 0.9, in_log_z


def test_tau_leaping_is_a_kernel_whose_marginals_hold_to_first_order() -> None:
    """Every law of a kernel holds but the last: the forward marginals, which are missed by O(step^2) a step."""
    kernel = ts.TauLeap(2, ts.Cosine())
    with pytest.raises(AssertionError, match="does not keep the forward marginal"):
        assert_kernel(kernel, 3)
    assert_kernel(kernel, 3, marginals=False)

    def missed(n: int) -> float:
        step = ts.uniform_steps(n)[n // 2]
        x, log_x0 = torch.tensor([[2]]), torch.tensor([[[0.5, 0.5, 0.0]]], dtype=torch.float64).log()
        ancestral = ts.Ancestral(2, ts.Cosine())(x, log_x0, step)
        return float((kernel(x, log_x0, step).log_move.exp() - ancestral.log_move.exp()).abs())

    sizes = [8, 16, 32, 64]
    assert slope(sizes, [missed(n) for n in sizes]) >= 1.8


def test_tau_leaping_agrees_with_leap() -> None:
    toy, step = Toy("A"), ts.Step(0, 0.7, 0.6)
    log_x0 = LOG_X0
    ours = ts.TauLeap(toy.mask_id)(toy.states, log_x0, step).dense().log_p
    rates = ct.masked_rate(toy.states, log_x0, step.t, ts.Linear(), toy.mask_id)
    theirs = ts.jumps.leap(toy.states, rates, step.t - step.s).log_p
    assert torch.equal(ours.isinf(), theirs.isinf())
    assert torch.where(ours.isinf(), 0.0, ours - theirs).abs().max() < 1e-12


# ---- one site at a time


def jumping(toy: Toy) -> ts.Diffusion:
    canvas = ts.template(toy.length, toy.mask_id)
    return model(toy, ts.FirstHitting(toy.mask_id), ts.event_steps(canvas, toy.mask_id))


@pytest.mark.parametrize("name", ["A", "B"])
def test_one_site_at_a_time_is_the_data(name: str) -> None:
    toy = Toy(name)
    exact = enumerate_steering(ts.Steering(jumping(toy), ts.Tilt(toy.reward, toy.kl)))
    assert (exact.model_law - toy.joint("p1").flatten()).abs().max() < 1e-12
    assert abs(exact.log_z - limit(toy).log_z) < 1e-12
    assert (exact.target - limit(toy).target).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["A", "B"])
def test_one_site_at_a_time_samples_the_data(name: str) -> None:
    toy, rows = Toy(name), 40_000
    result = ts.pretrained(jumping(toy))(1, rows, generator=torch.Generator().manual_seed(3))
    share = (result.samples == toy.clean).all(-1).double().mean(0)
    p = toy.joint("p1").flatten()
    assert ((share - p) / (p * (1 - p) / rows).sqrt())[p > 0].abs().max() < 4


def proposals(toy: Toy) -> dict[str, Callable[[], ts.Proposal]]:
    return {
        "model": ts.FromModel,
        "gradient": ts.Gradient,
        "tokens": lambda: ts.Gradient(tokens_only=True),
        "reinforce": lambda: ts.Gradient(clip=1.0),  # the gradient of two draws has heavy tails
        "amortised": toy.amortised,
        "optimal": ts.Optimal,
        "guided": ts.Guided,
    }


@pytest.mark.fast
@pytest.mark.parametrize("name", proposals(Toy("A")))
def test_one_site_at_a_time_steers_without_bias(name: str) -> None:
    toy = Toy("A")
    known, random = toy.tilt("mdm", ramp=ts.ramps.linear), ts.Tilt(toy.reward, toy.kl, draws=2)
    soft = known if name in ("gradient", "tokens") else random
    steering = ts.Steering(jumping(toy), soft, proposals(toy)[name]())
    outcome = trial(steering, limit(toy))
    assert outcome.unbiased, str(outcome)
    exact = enumerate_steering(replace(steering, twist=replace(soft, estimator=ts.Exact()), proposal=ts.FromModel()))
    assert abs(exact.log_z - limit(toy).log_z) < 1e-12


@pytest.mark.parametrize("name", ["gradient", "tokens", "amortised", "model"])
def test_jump_proposals_sum_to_one_and_keep_the_target(name: str) -> None:
    """By enumeration: sum of q is 1, of q·w is the model's move, from every state that is reached."""
    toy = Toy("A")
    steering = ts.Steering(jumping(toy), toy.tilt("mdm", ramp=ts.ramps.linear), proposals(toy)[name]())
    exact = enumerate_steering(steering)
    for moves in exact.moves:
        total = torch.zeros(len(exact.states), dtype=torch.float64).index_add(0, moves.row, moves.log_q.exp())
        assert (total - 1).abs().max() < 1e-12
        assert ((moves.log_q > -torch.inf) | (moves.log_p == -torch.inf)).all()
        changed = (exact.states[moves.row] != exact.states[moves.column]).sum(-1)
        assert torch.equal(changed, (exact.states[moves.row] == toy.mask_id).any(-1).long())


def test_one_site_at_a_time_steers_optimally() -> None:
    """Given x_t the weight under q* is a constant, and one-step look-ahead is unbiased."""
    toy = Toy("A")
    steering = ts.Steering(jumping(toy), toy.tilt("mdm", ramp=ts.ramps.linear), ts.Enumerated())
    exact = enumerate_steering(steering)
    for index, moves in enumerate(exact.moves):
        increment = exact.log_increment(index)
        for row in range(len(exact.states)):
            mine = increment[moves.row == row]
            assert mine.max() - mine.min() < 1e-12
    outcome = trial(steering, limit(toy))
    assert outcome.unbiased, str(outcome)


def test_a_jump_is_tilted_as_its_rate() -> None:
    """q(l, v) ∝ mu^l(v) exp(h[l, v] - h[l, mask]), a joint softmax over sites and tokens."""
    torch.manual_seed(0)
    x = torch.tensor([[2, 0, 2], [2, 2, 2], [1, 0, 1]])
    log_x0 = torch.randn(3, 3, 3, dtype=torch.float64)
    log_x0[..., 2] = -torch.inf
    log_x0, h = log_x0.log_softmax(-1), torch.randn(3, 3, 3, dtype=torch.float64)
    q = ts.FirstHitting(2)(x, log_x0, ts.Step(0, 1.0, 0.5)).tilt(h)
    joint = (log_x0 + h - h[..., 2:])[:2].masked_fill((x[:2] != 2).unsqueeze(-1), -torch.inf)
    joint = joint.flatten(1).log_softmax(-1).view(2, 3, 3)
    for row, site, token in itertools.product(range(2), range(3), range(2)):
        if x[row, site] == 2:
            y = x[row].clone()
            y[site] = token
            rows = torch.tensor([row])
            assert abs(q.take(rows).log_prob(y.unsqueeze(0)) - joint[row, site, token]) < 1e-12
    assert q.log_prob(x).tolist() == [-torch.inf, -torch.inf, 0.0]
    assert torch.equal(q.sample(None)[2], x[2])
    two = torch.tensor([[0, 0, 1], [0, 0, 2], [1, 0, 0]])
    assert q.log_prob(two).tolist() == [-torch.inf] * 3
    rows, listed = q.support(100)
    assert len(rows) == 4 + 6 + 1
    assert torch.allclose(
        torch.zeros(3).double().index_add(0, rows, q.take(rows).log_prob(listed).exp()), torch.ones(3).double()
    )


def test_products_one_site_at_a_time() -> None:
    """The limit of the discrete products, and exact for guided and optimal proposals alike."""
    toy = Toy("A")
    jumps, powers = jumping(toy), (1.5, -0.5)
    other = replace(jumps, denoiser=TableDenoiser(toy.joint("p2")))
    product = ts.Product((jumps, other), powers)
    truth = enumerate_steering(ts.Steering(product, proposal=ts.Optimal()))
    fine = [model(toy, ts.Ancestral(toy.mask_id), ts.uniform_steps(n)) for n in (128, 256)]
    gaps = [
        abs(
            enumerate_steering(ts.Steering(ts.Product((m, replace(m, denoiser=other.denoiser)), powers))).log_z
            - truth.log_z
        )
        for m in fine
    ]
    assert gaps[1] < 0.6 * gaps[0] < 0.01
    answer = Answer(truth.log_z, truth.target, toy.clean)
    for proposal in (ts.Guided(), ts.Optimal()):
        outcome = trial(ts.Steering(product, proposal=proposal), answer)
        assert outcome.unbiased, str(outcome)


def test_one_denoiser_call_for_each_free_site() -> None:
    toy = Toy("B")
    canvas = ts.template(toy.length, toy.mask_id, [1])
    jumps = ts.Diffusion(
        TableDenoiser(toy.joint("p1")), ts.FirstHitting(toy.mask_id), ts.event_steps(canvas, toy.mask_id), canvas
    )
    steering = ts.Steering(jumps, ts.Tilt(toy.reward, toy.kl), ts.Gradient())
    before = jumps.meter.calls
    result = ts.smc(steering, 4, 8, generator=torch.Generator().manual_seed(0))
    assert jumps.meter.calls - before == toy.length - 1 == len(jumps.steps)
    assert (result.samples[..., 0] == 1).all()
    law = toy.joint("p1")[1].flatten()
    exact = enumerate_steering(ts.Steering(jumps)).model_law
    assert (exact[exact > 0] - (law / law.sum())[law > 0]).abs().max() < 1e-12


def test_templates_of_different_lengths() -> None:
    """A row with fewer free sites is done early and stays."""
    toy = Toy("A")
    canvas = torch.tensor([[0, toy.mask_id], [toy.mask_id, toy.mask_id]])
    steps = ts.event_steps(canvas, toy.mask_id)
    jumps = ts.Diffusion(TableDenoiser(toy.joint("p1")), ts.FirstHitting(toy.mask_id), steps, canvas)
    result = ts.smc(ts.Steering(jumps), 1000, 2, generator=torch.Generator().manual_seed(0))
    assert (result.samples[0, :, 0] == 0).all()
    assert (result.log_z.abs() < 1e-12).all()


# ---- times


@pytest.mark.parametrize("schedule", [ts.Linear(), ts.Cosine(), ts.Geometric()], ids=lambda s: type(s).__name__)
def test_opening_times(schedule: ts.Schedule) -> None:
    """The k-th of n openings: n uniforms in 1 - alpha, sorted, so P(tau_k > t) is a binomial tail."""
    masked, start = torch.tensor([3, 1]).repeat_interleave(4000), 0.9
    times = ct.opening_times(schedule, masked, torch.Generator().manual_seed(1), start)
    assert times.shape == (8000, 3)
    assert (times.diff(dim=1) <= 0).all()
    assert (times[4000:, 1:] == 0).all()
    for t in (0.2, 0.5, 0.7):
        still = (1 - schedule.alpha(t)) / (1 - schedule.alpha(start))
        for n, seen in ((3, times[:4000]), (1, times[4000:, :1])):
            for k in range(n):
                p = sum(math.comb(n, j) * (1 - still) ** j * still ** (n - j) for j in range(k + 1, n + 1))
                share = float((seen[:, k] > t).double().mean())
                assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / 4000) + 1e-9


def test_paths_are_checked() -> None:
    x = torch.tensor([[[2, 2], [0, 2]]])
    with pytest.raises(ValueError, match="times must fall"):
        ts.testing.JumpPaths(torch.tensor([[0.5, 0.7, 0.1]]), x)
    with pytest.raises(ValueError, match="shape"):
        ts.testing.JumpPaths(torch.tensor([[0.5, 0.3]]), x)
    with pytest.raises(ValueError, match="two sites"):
        ts.testing.JumpPaths(torch.tensor([[0.5, 0.3, 0.1]]), torch.tensor([[[2, 2], [0, 1]]]))


def test_paths_may_end_at_zero() -> None:
    """Where nothing is left to open, nothing is infinite."""
    paths = ts.testing.JumpPaths(numbers([[1.0, 0.6, 0.01, 0.0]]), torch.tensor([[[2, 2], [2, 0], [1, 0]]]))
    ours = ts.testing.tilt_log_weight(paths, model_rate, proposal_rate, log_twist)
    excess = [float((TILTED - MU)[cell(x)].sum()) for x in paths.states[0]]
    held = excess[0] * math.log(1 / 0.6) + excess[1] * math.log(0.6 / 0.01)
    jumps = -INPUTS["c"] * (h(paths.states[0, -1:]) - h(paths.states[0, :1]))
    assert abs(ours - (held + jumps + h(paths.states[0, -1:]))).max() < 1e-12
