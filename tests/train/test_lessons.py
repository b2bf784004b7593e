"""What happens in a round of training, by hand: rates, averages, shares, memory, rows, reports and regularisers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from learned_toys import Table, denoiser_of, small
from narrow import some, untyped
from torch import nn
from toys import Toy

import tokensteer as ts
from tokensteer.train import (
    Balance,
    Batch,
    OfTime,
    PathVariance,
    Plan,
    ProposalPlan,
    Returns,
    StepVariance,
    Transitions,
    fit_proposal,
)
from tokensteer.train.optim import Optimiser
from tokensteer.train.paths import walk
from tokensteer.train.proposal import PathTrainee

B = Toy("B")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_learning_is_adamw_with_a_rate_for_each_part_and_an_average() -> None:
    net: Any = nn.ModuleDict({"slow": nn.Linear(1, 1, bias=False), "fast": nn.Linear(1, 1, bias=False)}).double()
    for part in net.values():
        nn.init.constant_(part.weight, 2.0)
    plan = Plan(2, weight_decay=0.1, clip=100.0, average=0.75)
    learning = Optimiser(net, plan, {}, seeded(), faster=((net["fast"], 5.0),))
    seen = []
    for _ in range(2):
        for part in net.values():
            part.weight.grad = torch.ones_like(part.weight)
        learning.learn(0.01)
        seen.append({name: float(part.weight.detach()) for name, part in net.items()})
    for name, rate in (("slow", 0.01), ("fast", 0.05)):  # equal gradients: Adam moves by the rate, decay by its share
        first = 2.0 * (1 - 0.1 * rate) - rate
        assert seen[0][name] == pytest.approx(first, abs=1e-7)
        assert seen[1][name] == pytest.approx(first * (1 - 0.1 * rate) - rate, abs=1e-7)
        mean = 2 / 11 * seen[0][name] + 9 / 11 * seen[1][name]  # the average keeps little of itself at first
        assert float(untyped(learning.average).module[name].weight.detach()) == pytest.approx(mean, abs=1e-9)


@dataclass
class Notes:
    """An objective that writes down what it is asked."""

    twists: bool = True
    whole: bool = False
    passes: int = 3
    seen: list[tuple[Batch, float]] = field(default_factory=list)

    def backward(self, lesson: Batch, share: float) -> torch.Tensor:
        self.seen.append((lesson, share))
        return torch.tensor(float(len(self.seen)))


def student(objective: Any, **options: Any) -> PathTrainee:
    steering = ts.Steering(B.model("mdm"), ts.Tilt(B.reward, B.kl, draws=2))
    plan = ProposalPlan(4, paths=8, **options)
    return PathTrainee(steering, Table(4, B.length), OfTime(), denoiser_of, plan, objective, seeded())


def spent(learner: PathTrainee) -> int:
    return sum(learner.own.resources.spent()[name][0] for name in ("denoiser", "proposal"))


def test_a_round_by_hand() -> None:
    notes = Notes()
    learner = student(notes, on_policy=0.75, replay=2, anneal=1.0)
    updates, before = [], spent(learner)
    learner.round(0.0, lambda: updates.append(len(notes.seen)))
    first, rows = list(notes.seen), learner.rows
    assert updates == [2]  # the proposal's paths and the model's, then one update
    assert [(len(lesson.moves.paths), share) for lesson, share in first] == [(6, 0.75), (2, 0.25)]
    num_steps = first[0][0].moves.paths.num_steps
    assert rows == spent(learner) - before + 3 * num_steps * 8
    assert float(learner.losses[0]) == pytest.approx(0.75 * 1 + 0.25 * 2)
    whole = learner.newest
    assert whole is not None
    torch.testing.assert_close(first[0][0].moves.paths.log_twist, learner.plan.amount(0.0) * whole.log_twist)
    assert learner.plan.amount(0.0) < 0.5
    notes.seen.clear()
    learner.round(1.0, lambda: None)
    own, other, again = (lesson.moves.paths for lesson, _ in notes.seen)
    assert any(torch.equal(again.x, lesson.moves.paths.x) for lesson, _ in first)  # one of those remembered
    assert sum(share for _, share in notes.seen) == pytest.approx(1.0)
    assert not torch.equal(own.x, first[0][0].moves.paths.x)
    torch.testing.assert_close(own.log_twist, some(learner.newest).log_twist)  # all of the reward, at the end
    assert len(other) == 2
    assert len(learner.memory) == 2


def test_a_report_is_that_of_the_newest_paths() -> None:
    learner = student(StepVariance())
    learner.round(0.0, lambda: None)
    said, paths = learner.report(learner.net, 1, 0.25, 3.0), learner.newest
    assert paths is not None
    log_q = Transitions(learner.own.model, learner.denoiser, paths).log_q(list(range(paths.num_steps))).sum(0).detach()
    log_p, reward = paths.log_p.sum(0), paths.log_twist[-1]
    w = (reward + log_p - log_q).double().exp()
    assert said.divergence == pytest.approx(float((log_q - log_p).mean()), abs=1e-5)
    assert said.reward == pytest.approx(float(reward.mean()), abs=1e-6)
    assert said.ess == pytest.approx(float(w.sum() ** 2 / w.square().sum()) / len(paths), abs=1e-6)
    assert said.ess < 0.999


@pytest.mark.parametrize("objective", [StepVariance(), PathVariance(), Balance()])
def test_regularisers_pull_as_they_should(objective) -> None:
    steering = ts.Steering(B.model("mdm"), ts.Tilt(B.reward, B.kl, draws=2))
    paths = walk(steering, 6, seeded())

    def pull(entropy: float, kl: float) -> torch.Tensor:
        net = Table(4, 3)
        moves = Transitions(steering.model, net.denoiser(), paths)
        objective.backward(Batch(moves, OfTime().double(), range(paths.num_steps), entropy=entropy, kl=kl), 0.5)
        assert net.logits.grad is not None
        return net.logits.grad

    net = Table(4, 3)
    moves = Transitions(steering.model, net.denoiser(), paths)
    steps = list(range(paths.num_steps))
    held = Batch(moves, OfTime(), steps, entropy=0.3, kl=2.0).penalty(steps, moves.measures(steps))
    (exact,) = torch.autograd.grad(torch.as_tensor(0.5 * held / len(steps)), net.logits)
    assert exact.abs().max() > 1e-3
    torch.testing.assert_close(pull(0.3, 2.0) - pull(0.0, 0.0), exact, rtol=1e-5, atol=1e-9)


def test_rows_are_those_that_networks_are_asked_about() -> None:
    walked = student(Returns(), updates=5)
    before = spent(walked)
    walked.round(0.0, lambda: None)
    assert walked.rows == spent(walked) - before  # v alone learns
    held, free = student(StepVariance(), kl=0.1), student(StepVariance())
    for learner in (held, free):
        learner.round(0.0, lambda: None)
    assert held.rows > free.rows  # KL from the model asks the model again


def test_what_would_go_wrong_unseen_is_refused(tmp_path) -> None:
    for wrong in ({"times": 0}, {"last": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            ProposalPlan(1, **wrong)
    for wrong in ({"rate": -1.0}, {"clip": 0.0}, {"kl": -0.1}, {"entropy": float("nan")}):
        with pytest.raises(ValueError, match=r"positive and finite|not negative|lie in"):
            ProposalPlan(1, **untyped(wrong))
    with pytest.raises(ValueError, match="average must lie in \\[0, 1\\)"):
        ProposalPlan(1, average=1.5)
    with pytest.raises(ValueError, match="leave out times and last"):
        student(Balance(), times=2)
    net = Table(4, B.length)
    own = replace(B.model("mdm"), denoiser=net.denoiser())
    with pytest.raises(ValueError, match="give a copy"):
        fit_proposal(
            ts.Steering(own, ts.Tilt(B.reward, B.kl)),
            net,
            denoiser_of,
            plan=ProposalPlan(1),
            generator=seeded(),
        )
    small(tmp_path / "x.safetensors", rounds=2)
    with pytest.raises(ValueError, match="another plan"):
        small(tmp_path / "x.safetensors", rounds=2, num_steps=5)


def test_sums_over_sites_are_refused_where_sites_hang_together() -> None:
    model = replace(B.model("mdm"), kernel=ts.MaskGIT(B.mask_id, temperature=1.0))
    steering = ts.Steering(model, ts.Tilt(B.reward, B.kl, draws=2))
    paths = walk(steering, 4, seeded())
    moves = Transitions(steering.model, Table(4, 3).denoiser(), paths)
    for entropy, kl in ((0.1, 0.0), (0.0, 0.1)):
        with pytest.raises(ValueError, match="hang together"):
            StepVariance().backward(Batch(moves, OfTime(), [0], entropy=entropy, kl=kl), 1.0)
    StepVariance().backward(Batch(moves, OfTime(), [0]), 1.0)
