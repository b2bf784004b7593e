"""Learned proposals and twists: objectives against golden numbers, training against enumeration."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace

import pytest
import torch
from checks import answer, trial
from learned_toys import B, Table, denoiser_of, place, small
from narrow import some
from torch import Tensor, nn
from toys import Toy, case, seeded

import tokensteer as ts
from tokensteer.core.models.denoiser import Time
from tokensteer.rewards import constrain, contains
from tokensteer.testing import Enumeration, enumerate_steering
from tokensteer.train import (
    Balance,
    Batch,
    Contrastive,
    OfState,
    OfTime,
    Paths,
    PathVariance,
    PerStep,
    ProposalPlan,
    Returns,
    StepVariance,
    Transitions,
    fit_proposal,
    walk,
)
from tokensteer.train.paths import Late

torch.set_num_threads(1)

A = Toy("A")


# ---- objectives


@dataclass(frozen=True)
class Known(Transitions):
    """Moves whose log q stands in a table for each step, from state to state."""

    tables: tuple[Tensor, ...] = ()

    def measures(self, steps: list[int]) -> list:
        return [None for _ in steps]

    def log_q(self, steps: list[int], measures: list | None = None) -> Tensor:
        place_of = place(self.paths.x, self.model.vocab_size)
        return torch.stack([self.tables[k][place_of[k], place_of[k + 1]] for k in steps]).requires_grad_()


def table(exact: Enumeration, index: int, log_q: Tensor) -> Tensor:
    moves = exact.moves[index]
    empty = torch.full((len(exact.states), len(exact.states)), -math.inf, dtype=log_q.dtype)
    return empty.index_put((moves.row, moves.column), log_q)


def all_paths(exact: Enumeration) -> Paths:
    """Every path that the model can walk, with its probability."""
    start = int(exact.log_law[0].argmax())
    lines, log_p = torch.tensor([[start]]), torch.zeros(1, 0, dtype=torch.float64)
    for k, moves in enumerate(exact.moves):
        step = table(exact, k, moves.log_p)[lines[:, -1]]
        row, column = (step > -math.inf).nonzero(as_tuple=True)
        lines = torch.cat([lines[row], column.unsqueeze(-1)], -1)
        log_p = torch.cat([log_p[row], step[row, column].unsqueeze(-1)], -1)
    twist = torch.stack([exact.log_twist[k][lines[:, k]] for k in range(lines.shape[1])])
    return Paths(exact.states[lines.T], twist, log_p.T, torch.zeros_like(log_p.T), twist[-1], share=log_p.sum(-1).exp())


PROPOSALS = ("base", "locally_optimal", "globally_optimal", "learned")


def known(name: str) -> tuple[Known, Enumeration]:
    q = A.amortised() if name == "learned" else ts.FromModel()
    steering = ts.Steering(A.model("mdm"), A.tilt("mdm"), q)
    exact = enumerate_steering(steering)
    rows = []
    for k, moves in enumerate(exact.moves):
        log_q = {
            "base": moves.log_p,
            "learned": moves.log_q,
            "locally_optimal": exact.log_optimal(k),
            "globally_optimal": moves.log_p + exact.log_value[k + 1][moves.column] - exact.log_value[k][moves.row],
        }[name]
        rows.append(table(exact, k, log_q))
    return Known(steering.model, A.model("mdm").denoiser, all_paths(exact), tuple(rows)), exact


@pytest.mark.parametrize("name", PROPOSALS)
def test_golden_case_19(name: str) -> None:
    moves, _ = known(name)
    paths, golden, num_steps = moves.paths, case(19)["outputs"][name], 3
    assert paths.share is not None
    rise = paths.log_twist.diff(dim=0) + paths.log_p - moves.log_q([0, 1, 2])
    assert float(paths.share.sum()) == pytest.approx(1, abs=1e-12)
    losses = {"F_of_t": [], "F_of_x": []}
    for k in range(num_steps):
        here = place(paths.x[k], 3)
        mass = torch.zeros(9, dtype=torch.float64).index_add(0, here, paths.share)
        mean = torch.zeros(9, dtype=torch.float64).index_add(0, here, paths.share * rise[k].detach()) / mass
        of_t, t = float(paths.mean(rise[k]).detach()), num_steps - k
        assert of_t == pytest.approx(golden["F_t"][str(t)], abs=1e-6)
        for kind, baseline in (
            ("F_of_t", lambda x, t, of_t=of_t: torch.full_like(x[:, 0], of_t, dtype=torch.float64)),
            ("F_of_x", lambda x, t, mean=mean: mean[place(x, 3)]),
        ):
            loss = StepVariance().backward(Batch(moves, baseline, [k]), 1.0)
            assert float(loss) == pytest.approx(golden[f"per_t_{kind}"][str(t)], abs=1e-6)
            losses[kind].append(float(loss))
    for kind, values in losses.items():
        assert sum(values) / num_steps == pytest.approx(golden[f"loss_{kind}"], abs=1e-6)
    nothing = Batch(moves, lambda x, t: torch.zeros_like(x[:, 0], dtype=torch.float64), range(num_steps))
    assert float(PathVariance().backward(nothing, 1.0)) == pytest.approx(golden["path_log_variance"], abs=1e-6)


@pytest.mark.parametrize(("decay", "ends"), [(0.0, 0.0), (0.7, 0.5), (1.0, 1.0), (math.inf, 0.0)])
def test_balance_is_zero_at_the_global_optimum_alone(decay: float, ends: float) -> None:
    for name in PROPOSALS:
        moves, exact = known(name)

        def value(x: Tensor, t: Time, exact: Enumeration = exact) -> Tensor:
            return exact.log_value[round(3 - 3 * float(t))][place(x, 3)].clone().requires_grad_()

        loss = float(Balance(decay, ends).backward(Batch(moves, value, range(3)), 1.0))
        assert (loss < 1e-20) == (name == "globally_optimal"), (name, loss)
    moves, exact = known("globally_optimal")
    wrong = Batch(moves, lambda x, t: torch.full_like(x[:, 0], 0.3, dtype=torch.float64, requires_grad=False), range(3))
    assert float(Balance(decay, ends).backward(wrong, 1.0)) > 1e-3


@pytest.mark.parametrize(("decay", "ends"), [(0.0, 0.0), (0.5, 0.0), (0.5, 0.3), (0.5, 1.0), (math.inf, 0.3)])
def test_balance_by_hand(decay: float, ends: float) -> None:
    """Of three steps there are six stretches: they weigh 1, decay or decay² by their length, and the three that reach
    the end share `ends` of the weight among them besides."""
    moves, _ = known("learned")
    paths, level = moves.paths, torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
    gap = (paths.log_p - moves.log_q([0, 1, 2])).detach()
    v = torch.cat([level.unsqueeze(-1).expand(3, paths.log_p.shape[1]), paths.log_twist[-1:]])
    loss = {
        (i, j): float(paths.mean((v[j] - v[i] + gap[i:j].sum(0)).square()))
        for i, j in [(0, 1), (1, 2), (2, 3), (0, 2), (1, 3), (0, 3)]
    }
    if decay == math.inf:
        expected = loss[0, 3]
    else:
        share = {pair: decay ** (pair[1] - pair[0] - 1) for pair in loss}
        inner = sum(share[pair] * loss[pair] for pair in loss) / sum(share.values())
        expected = (1 - ends) * inner + ends * (loss[0, 3] + loss[1, 3] + loss[2, 3]) / 3

    def value(x: Tensor, t: Time) -> Tensor:
        return level[round(3 - 3 * float(t))].expand(len(x)).clone().requires_grad_()

    found = float(Balance(decay, ends).backward(Batch(moves, value, range(3)), 1.0))
    assert found == pytest.approx(expected, rel=1e-9)


def test_returns_learn_the_value_of_the_best_proposal() -> None:
    """Where all weights are equal, what is still to come is the value itself; otherwise its mean, which is less."""
    for name in PROPOSALS:
        moves, exact = known(name)
        paths = moves.paths
        moves = replace(moves, paths=replace(paths, log_ratio=(paths.log_p - moves.log_q([0, 1, 2])).detach()))

        def value(x: Tensor, t: Time, exact: Enumeration = exact) -> Tensor:
            return exact.log_value[round(3 - 3 * float(t))][place(x, 3)].clone().requires_grad_()

        def lacking(x: Tensor, t: Time, exact: Enumeration = exact) -> Tensor:
            k, here = round(3 - 3 * float(t)), place(x, 3)
            return (exact.log_value[k] - exact.log_twist[k])[here].requires_grad_()

        for objective, learned in ((Returns(), value), (Returns(twists=True), lacking)):
            loss = float(objective.backward(Batch(moves, learned, range(3)), 1.0))
            assert (loss < 1e-20) == (name == "globally_optimal"), (name, loss)


@pytest.mark.parametrize("name", PROPOSALS)
@pytest.mark.parametrize("twists", [False, True])
def test_the_odds_of_target_against_model_are_the_value(name: str, twists: bool) -> None:
    """Whoever walked the paths: the gradient in v is zero at log V - log Z, and only there."""
    moves, exact = known(name)
    paths = moves.paths
    ratio = (paths.log_p - moves.log_q([0, 1, 2])).detach()
    walked = some(paths.share) * (-ratio.sum(0)).exp()  # each path as often as q walks it
    paths = replace(paths, log_ratio=ratio, share=walked)
    odds = [exact.log_value[k] - exact.log_z - (exact.log_twist[k] if twists else 0.0) for k in range(3)]
    for wrong in (0.0, 0.3):
        level = [(value + wrong).clone().requires_grad_() for value in odds]

        def v(x: Tensor, t: Time, level: list[Tensor] = level) -> Tensor:
            return level[round(3 - 3 * float(t))][place(x, 3)]

        Contrastive(twists=twists).backward(Batch(replace(moves, paths=paths), v, range(3)), 1.0)
        slopes = torch.cat([some(values.grad) for values in level])
        assert (float(slopes.abs().max()) < 1e-12) == (wrong == 0.0)


@pytest.mark.parametrize("kernel", ["mdm", "remdm", "lowconf"])
def test_paths_know_what_their_walker_thought_of_their_moves(kernel: str) -> None:
    model, q = B.model(kernel), B.amortised()
    steering = ts.Steering(model, B.tilt(kernel), q)
    steps, since = range(len(model.steps)), 1
    late = replace(steering, proposal=Late(q, model.steps[since].t))
    for walker, first in ((steering, 0), (late, since), (replace(steering, proposal=ts.FromModel()), len(steps))):
        for twists in (True, False):
            paths = walk(walker, 200, seeded(), twists)
            expected = paths.log_p - Transitions(model, q.denoiser, paths).log_q(list(steps))
            expected[:first] = 0.0  # the model thinks of its own moves as it does
            assert torch.allclose(paths.log_ratio, expected, atol=1e-9)
            assert torch.allclose(paths.log_ratio.sum(0) + paths.log_twist[-1], paths.log_w, atol=1e-9)


@pytest.mark.slow
def test_a_twist_is_taught_to_a_frozen_proposal() -> None:
    """It is the mean of the log-weight still to come from each state, also from those that the proposal avoids."""
    model, net, value = one_site(), Table(4, B.length), StateValue(4, B.length)
    with torch.no_grad():
        net.logits[:, 0, 0] -= 12.0  # never 0 at the first site
    before = net.logits.clone()
    learned = fit_proposal(
        ts.Steering(model, B.tilt("mdm")),
        net.requires_grad_(False),
        lambda net: ts.from_logits(net, B.mask_id, ignores_time=True),
        plan=ProposalPlan(80, paths=64, on_policy=0.5, updates=4, replay=8, rate=0.05, baseline_rate=1.0),
        generator=seeded(2),
        baseline=value,
        objective=Returns(),
    )
    assert torch.equal(learned.net.state_dict()["logits"], before)
    exact = enumerate_steering(ts.Steering(model, B.tilt("mdm"), ts.Amortised(learned.denoiser)))
    to_come, avoided = exact.log_twist[-1], 0
    found = learned.baseline(exact.states, 0.5)
    for k, moves in reversed(list(enumerate(exact.moves))):
        rise = moves.log_q.exp() * (moves.log_p - moves.log_q + to_come[moves.column])
        to_come = torch.zeros_like(to_come).index_add(0, moves.row, rise)
        reached = exact.log_law[k] > math.log(1e-3)  # by the model, which walks up to there
        avoided += int((reached & (exact.log_proposed()[k] < math.log(1e-3))).sum())
        spread = float(to_come[reached].std()) if k else 1.0
        off, often = (found - to_come)[reached].square(), exact.log_law[k][reached].softmax(-1)
        assert (off * often).sum().sqrt() < 0.15 * spread, k
        assert off.max().sqrt() < 0.4 * spread, k
    assert avoided > 0


def test_regularisers_are_exact() -> None:
    """-H(q) and KL(q | p) of the transition, by enumeration of all that can follow."""
    model = B.model("remdm")
    steering = ts.Steering(model, B.tilt("remdm"), B.amortised())
    exact = enumerate_steering(steering)
    paths = walk(steering, 5, seeded())
    for k in range(paths.num_steps):
        moves = Transitions(model, B.amortised().denoiser, paths)
        q = moves.measures([k])
        here = place(paths.x[k], 4)
        listed = exact.moves[k]
        for entropy, kl in ((1.0, 0.0), (0.0, 1.0), (0.5, 2.0)):
            lesson = Batch(moves, OfTime(), [k], entropy=entropy, kl=kl)
            log_q, log_p = listed.log_q, listed.log_p
            gap = (entropy + kl) * log_q - kl * log_p
            each = torch.where(log_q > -math.inf, log_q.exp() * gap, 0.0)
            total = torch.zeros(len(exact.states), dtype=torch.float64).index_add(0, listed.row, each)
            assert float(lesson.penalty([k], q)) == pytest.approx(float(total[here].mean()), abs=1e-9)


def test_gradients_do_not_depend_on_how_many_rows_go_at_once() -> None:
    steering = ts.Steering(B.model("lowconf"), B.tilt("lowconf"))
    paths = walk(steering, 6, seeded())
    for objective in (StepVariance(), Balance(0.8), PathVariance()):
        found = []
        for rows in (1, 10_000):
            torch.manual_seed(0)
            net, baseline = Table(4, 3), OfState(4, 3, 16)
            moves = Transitions(steering.model, net.denoiser(), paths)
            lesson = Batch(moves, baseline, range(paths.num_steps), rows, entropy=0.1, kl=0.2)
            objective.backward(lesson, 1.0)
            found.append(
                torch.cat([p.grad.flatten() for p in (*net.parameters(), *baseline.parameters()) if p.grad is not None])
            )
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
        assert found[0].abs().max() > 1e-3


# ---- training


class StateValue(nn.Module):
    """A number for each state; the state tells the time where one site opens in each step."""

    def __init__(self, vocab_size: int, length: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.values = nn.Parameter(torch.zeros(vocab_size**length, dtype=torch.float64))

    def forward(self, x: Tensor, t: float) -> Tensor:
        return self.values[place(x, self.vocab_size)]


def one_site() -> ts.Diffusion:
    """Toy B with one site opened at each step: then both optima are laws of one token, which a network can say."""
    model = B.model("mdm")
    kernel = ts.Ranked(B.mask_id, count=lambda step, masked: torch.ones_like(masked))
    return replace(model, kernel=kernel, steps=ts.uniform_steps(B.length))


def learn(objective=None, baseline: nn.Module | None = None, rounds: int = 120, **options):
    steering = ts.Steering(one_site(), B.tilt("mdm", ramp=ts.ramps.linear))
    net = Table(4, B.length)
    settings = {"paths": 128, "on_policy": 0.5, "rate": 0.4, "baseline_rate": 1.0, "average": 0.9, "clip": 100.0}
    learned = fit_proposal(
        steering,
        net,
        lambda net: ts.from_logits(net, B.mask_id, ignores_time=True),
        plan=ProposalPlan(rounds, **(settings | options)),
        generator=seeded(1),
        baseline=StateValue(4, B.length) if baseline is None else baseline,
        objective=objective,
    )
    return steering, learned


def gap_to_local_optimum(steering: ts.Steering, denoiser: ts.Denoiser) -> float:
    """The largest total variation from q* at any state that the model reaches."""
    exact = enumerate_steering(replace(steering, proposal=ts.Amortised(denoiser)))
    worst = 0.0
    for k, moves in enumerate(exact.moves):
        apart = (moves.log_q.exp() - exact.log_optimal(k).exp()).abs()
        by_state = torch.zeros(len(exact.states), dtype=torch.float64).index_add(0, moves.row, apart) / 2
        worst = max(worst, float(by_state[exact.log_law[k] > math.log(1e-3)].max()))
    return worst


@pytest.mark.slow
def test_a_baseline_of_the_state_lets_the_loss_reach_zero() -> None:
    steering, learned = learn()
    assert learned.history[-1].loss < 1e-3
    assert gap_to_local_optimum(steering, learned.denoiser) < 0.01


@pytest.mark.parametrize("kind", ["scalars", pytest.param("network", marks=pytest.mark.slow)])
def test_a_baseline_of_the_time_does_not(kind: str) -> None:
    """F(t) must stand for log E[exp(psi_s) | x_t] - psi_t, which differs from state to state: what is left is the
    variance of that, and q gives up its optimum to make it smaller."""
    baseline = PerStep(one_site().steps) if kind == "scalars" else OfTime(32)
    steering, learned = learn(baseline=baseline, rounds=60)
    exact = enumerate_steering(steering)
    floor = 0.0
    for k, moves in enumerate(exact.moves):
        lookahead = (
            torch.zeros(len(exact.states), dtype=torch.float64)
            .index_add(0, moves.row, (moves.log_p + exact.log_twist[k + 1][moves.column]).exp())
            .log()
            - exact.log_twist[k]
        )
        floor = max(floor, float(lookahead[exact.log_law[k] > -5].std()) if k else 0.0)
    assert floor > 0.1  # what F(t) cannot say
    assert learned.history[-1].loss > 0.1
    assert gap_to_local_optimum(steering, learned.denoiser) > 0.1


@pytest.mark.parametrize(
    "objective",
    [pytest.param(Balance(0.0), marks=pytest.mark.slow), pytest.param(Balance(0.9, ends=0.5), marks=pytest.mark.slow)],
    ids=["steps", "stretches"],
)
def test_a_learned_twist_and_proposal_have_equal_weights(objective: Balance) -> None:
    steering, learned = learn(objective)
    tilt = ts.LearnedTwist(learned.baseline).on(some(steering.twist))
    method = ts.smc_amot(steering.model, tilt, learned.denoiser)
    result = method(64, 50, generator=seeded(2))
    exact = enumerate_steering(steering)
    assert float(result.ess.min() / 64) > 0.99
    assert float(result.log_z.std()) < 0.02
    assert float((result.log_z - exact.log_z).abs().max()) < 0.05
    assert trial(method.steering, answer(steering.model, steering.twist), populations=2048).unbiased


@pytest.mark.slow
@pytest.mark.parametrize("objective", [Balance(math.inf), PathVariance()], ids=["balance", "variance"])
def test_whole_paths_find_the_same_proposal(objective) -> None:
    steering, learned = learn(objective)
    result = ts.prop_amot(steering.model, some(steering.twist), learned.denoiser)(64, 20, generator=seeded(2))
    assert float(result.ess[-1].min() / 64) > 0.99
    log_z = enumerate_steering(steering).log_z
    assert float((result.log_z - log_z).abs().max()) < 0.02
    if isinstance(objective, Balance):  # what it learned of the start is log Z
        assert float(learned.baseline(steering.start(1, None), 1.0)) == pytest.approx(log_z, abs=0.02)


@pytest.mark.parametrize("sampler", ["mdm", pytest.param("remdm", marks=pytest.mark.slow), "lowconf"])
def test_a_bad_proposal_and_twist_stay_unbiased(sampler: str) -> None:
    """Trained for a moment, badly, for another reward: the weight keeps log p - log q and the twist telescopes."""
    other = ts.Steering(B.model(sampler), ts.Tilt(lambda x: -B.reward(x), B.kl))
    plan = ProposalPlan(15, paths=32, rate=0.3)
    torch.manual_seed(0)
    learned = fit_proposal(
        other, Table(4, B.length), lambda net: ts.from_logits(net, B.mask_id, ignores_time=True), plan=plan,
        generator=seeded(), objective=Balance(0.5),
    )  # fmt: skip
    twist = ts.LearnedTwist(lambda x, t: learned.baseline(x, t).clamp(-1, 1))
    for tilt in (twist.on(ts.Tilt(B.reward, 2.0)), twist.beside(ts.Tilt(B.reward, 2.0))):
        steering = ts.Steering(B.model(sampler), tilt, ts.Amortised(learned.denoiser))
        outcome = trial(steering, answer(steering.model, steering.twist))
        assert outcome.unbiased, str(outcome)


def test_what_was_learned_goes_beside_the_estimate() -> None:
    """psi_t = ramp(t)/kl · r_hat + value, and r/kl at the end; what an exact estimate lacks makes weights equal."""
    model, tilt = A.model("mdm"), A.tilt("mdm")
    exact = enumerate_steering(ts.Steering(model, tilt))

    def lacking(x: Tensor, t: float) -> Tensor:
        k = round(3 - 3 * float(t))
        return (exact.log_value[k] - exact.log_twist[k])[place(x, 3)]

    both = enumerate_steering(ts.Steering(model, ts.LearnedTwist(lacking).beside(tilt)))
    assert all(torch.allclose(both.log_twist[k], exact.log_value[k], atol=1e-12) for k in range(4))
    assert both.log_z == pytest.approx(exact.log_z, abs=1e-12)
    drawn = replace(tilt, estimator=ts.Sampled())
    result, plain = (
        ts.smc_base(model, t)(4, 3, generator=seeded()) for t in (ts.LearnedTwist(lacking).beside(drawn), drawn)
    )
    assert result.rows["reward"] > plain.rows["reward"] + 12  # it is a network too
    beside = ts.LearnedTwist(lacking).beside(tilt)
    for wrong in (lambda: ts.LearnedTwist(lacking).beside(beside), lambda: constrain(model, contains([1], 3), beside)):
        with pytest.raises(ValueError, match="already"):
            wrong()
    with pytest.raises(ValueError, match="one number for each"):
        ts.smc_base(model, ts.LearnedTwist(lambda x, t: x.double()).beside(tilt))(4, 3)


# ---- plans, checkpoints, refusals


class KilledError(Exception):
    pass


@pytest.mark.parametrize("when", [1, 4])
def test_killed_and_resumed_is_the_same_run(tmp_path, monkeypatch, when: int) -> None:
    from tokensteer.train import proposal_trainee

    whole = small()
    walked = 0

    def dies(*args, **kwargs):
        nonlocal walked
        walked += 1
        if walked > 2 * when:  # two walks in a round: of the proposal and of the model
            raise KilledError
        return walk(*args, **kwargs)

    monkeypatch.setattr(proposal_trainee, "walk", dies)
    with pytest.raises(KilledError):
        small(tmp_path / "half.safetensors")
    monkeypatch.setattr(proposal_trainee, "walk", walk)
    resumed = small(tmp_path / "half.safetensors")
    for a, b in zip(whole.net.parameters(), resumed.net.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(whole.baseline.parameters(), resumed.baseline.parameters(), strict=True):
        assert torch.equal(a, b)
    assert [replace(entry, seconds=0.0) for entry in whole.history] == [
        replace(entry, seconds=0.0) for entry in resumed.history
    ]
    assert whole.rows == resumed.rows
    with pytest.raises(ValueError, match="another plan"):
        small(tmp_path / "half.safetensors", rounds=7)


def test_which_steps_are_looked_at() -> None:
    from tokensteer.train.proposal import PathTrainee

    steering = ts.Steering(B.model("mdm"), B.tilt("mdm"))
    net, generator = Table(4, B.length), seeded()
    asked = {}
    for name, options in {
        "all": {},
        "random": {"times": 3},
        "last": {"last": 4},
        "both": {"last": 5, "times": 2},
    }.items():
        student = PathTrainee(
            steering, net, OfTime(), denoiser_of, ProposalPlan(1, **options), StepVariance(), generator
        )
        asked[name] = [student._steps(10) for _ in range(50)]
    assert asked["all"][0] == list(range(10))
    assert all(len(steps) == 3 and steps[-1] == 9 and steps == sorted(set(steps)) for steps in asked["random"])
    assert {k for steps in asked["random"] for k in steps} == set(range(10))
    assert asked["last"][0] == [6, 7, 8, 9]
    assert all(len(steps) == 2 and steps[-1] == 9 and steps[0] >= 5 for steps in asked["both"])


def test_the_reward_is_let_in_by_and_by() -> None:
    plan = ProposalPlan(100, anneal=0.2)
    amounts = [plan.amount(k / 100) for k in range(0, 100, 5)]
    assert amounts == sorted(amounts)
    assert 0 < amounts[0] < 0.1
    assert amounts[4:] == [1.0] * 16


def test_reports() -> None:
    seen = []
    learned = small(watch=seen.append)
    assert [entry.step for entry in seen] == [4, 6]
    assert list(learned.history) == seen
    assert all(0 < entry.ess <= 1 and entry.divergence > -1 for entry in seen)
    assert learned.rows > 0


def test_prompts_of_many_populations() -> None:
    """Templates stay where they are, and each population its own."""
    model = replace(B.model("mdm"), template=torch.tensor([[0, 3, 3], [3, 3, 1]]))
    steering = ts.Steering(model, ts.Tilt(B.reward, B.kl))
    paths = walk(steering, 8, seeded())
    assert (paths.x[:, :4, 0] == 0).all()
    assert (paths.x[:, 4:, 2] == 1).all()
    for objective in (StepVariance(), Balance(), PathVariance()):
        learned = fit_proposal(
            steering, Table(4, 3), denoiser_of, plan=ProposalPlan(3, paths=8), generator=seeded(),
            objective=objective,
        )  # fmt: skip
        assert math.isfinite(learned.history[-1].loss)


def test_refused() -> None:
    net = Table(4, B.length)
    with pytest.raises(ValueError, match="give it a Tilt"):
        fit_proposal(ts.Steering(B.model("mdm")), net, denoiser_of, plan=ProposalPlan(1), generator=seeded())
    hard = ts.Tilt(lambda x: torch.where(x[:, 0] == 0, 0.0, -math.inf), 1.0)
    with pytest.raises(ValueError, match="finite everywhere"):
        fit_proposal(
            ts.Steering(B.model("mdm"), hard), net, denoiser_of, plan=ProposalPlan(1),
            generator=seeded(),
        )  # fmt: skip
    with pytest.raises(ValueError, match="at least 1"):
        ProposalPlan(0)
    with pytest.raises(ValueError, match="on_policy must lie in \\[0, 1\\]"):
        ProposalPlan(1, on_policy=2)
    with pytest.raises(ValueError, match="decay"):
        Balance(-1)
    with pytest.raises(ValueError, match="ends"):
        Balance(ends=2)


KILLED = """
import sys
from pathlib import Path

import learned_toys
import torch

learned = learned_toys.small(Path(sys.argv[1]), rounds=40, replay=2)
torch.save(learned.net.state_dict(), sys.argv[1] + ".end")
"""


@pytest.mark.slow
def test_kill_9_at_any_moment(tmp_path) -> None:
    """A process that is killed while it trains or writes leaves a checkpoint that the next goes on from."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    checkpoint, script = tmp_path / "run.safetensors", tmp_path / "killed.py"
    script.write_text(KILLED)
    kills = 0
    for wait in (0.0, 0.35, 0.15):  # seconds after it has written something new
        before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        process = subprocess.Popen([sys.executable, script, checkpoint], env=environment)
        while process.poll() is None and (not checkpoint.exists() or checkpoint.stat().st_mtime_ns == before):
            time.sleep(0.01)
        time.sleep(wait)
        process.kill()
        kills += process.wait() == -signal.SIGKILL
    assert kills >= 1
    ends = []
    for file in (checkpoint, tmp_path / "whole.safetensors"):
        # In processes of their own: what other tests have made torch fall back to would change the last bits.
        subprocess.run([sys.executable, script, file], env=environment, check=True)
        ends.append(torch.load(f"{file}.end"))
    resumed, whole = ends
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
