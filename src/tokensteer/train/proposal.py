"""Training of a proposal, and with it of a twist: walk paths, learn from them, walk again.

Each round walks paths with the proposal as it is (and some with the model, if asked to), and makes a few updates from
them and from what is remembered of earlier rounds. The weight of a sampler always keeps log p - log q, so that a
proposal that was trained badly costs effective sample size and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from tokensteer.core.models.denoiser import Denoiser
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.numerics.domains import check_numbers, check_wholes
from tokensteer.core.particles.resampling import ess
from tokensteer.core.proposals.amortised import Amortised
from tokensteer.core.proposals.proposal import FromModel
from tokensteer.core.steering.steering import Steering
from tokensteer.train.baselines import OfState
from tokensteer.train.frozen import fingerprint
from tokensteer.train.objectives import Batch, Objective, Returns, StepVariance
from tokensteer.train.optim import Optimiser, described, described_net, digest, same_draws
from tokensteer.train.paths import Late, Paths, Transitions, walk
from tokensteer.train.rounds import Gathers, run_rounds


@dataclass(frozen=True)
class ProposalPlan:
    """How long, how fast, and from what.

    A round walks `paths`, a share `on_policy` of them with the proposal and the rest with the model (for `Returns`, up
    to a random time), and makes `updates` from them; the `replay` sets of paths before these are remembered (a round
    that mixes makes two), and an update takes one of them at random besides the newest. An update looks at `times`
    random steps, all if None, of the `last` so many, and always at the very last.
    The reward grows to its full size over a share `anneal` of the run. The baseline learns `baseline_rate` times as
    fast as the network: it has to reach the size of log-weights.
    """

    rounds: int
    paths: int = 64
    updates: int = 1
    on_policy: float = 1.0
    replay: int = 0
    times: int | None = None
    last: int | None = None
    anneal: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    rate: float = 1e-3
    baseline_rate: float = 10.0
    warmup: float = 0.02
    weight_decay: float = 0.0
    clip: float = 1.0
    average: float = 0.99
    rows: int = 4096
    seconds: float | None = None
    report_every: int = 10
    save_every: int = 100

    def __post_init__(self) -> None:
        counts = {"rounds": self.rounds, "paths": self.paths, "updates": self.updates, "rows": self.rows}
        few = {"times": self.times, "last": self.last, "report_every": self.report_every, "save_every": self.save_every}
        check_wholes("ProposalPlan", 1, **counts, **few)
        check_wholes("ProposalPlan", 0, replay=self.replay)
        check_numbers("ProposalPlan", "[0, 1]", on_policy=self.on_policy, anneal=self.anneal)
        check_numbers("ProposalPlan", "[0, 1)", warmup=self.warmup, average=self.average)
        check_numbers(
            "ProposalPlan", "(0, inf)", rate=self.rate, baseline_rate=self.baseline_rate, seconds=self.seconds
        )
        check_numbers("ProposalPlan", "(0, inf]", clip=self.clip)
        check_numbers("ProposalPlan", "[0, inf)", entropy=self.entropy, kl=self.kl, weight_decay=self.weight_decay)

    def amount(self, done: float) -> float:
        """How much of the reward counts when a share `done` of the run is over."""
        return 1.0 if done >= self.anneal else (done + 1.0 / self.rounds) / (self.anneal + 1.0 / self.rounds)


@dataclass(frozen=True)
class Progress:
    """Where a training stands: the loss, and of the newest paths of the proposal (of the model, if it walks them all)
    the effective sample size of their weights as a share of all, the mean reward over kl, and KL(q | p) of whole
    paths. The report of the end is of the averaged networks, which are returned, and of new paths walked with them."""

    step: int
    done: float
    loss: float
    seconds: float
    ess: float
    reward: float
    divergence: float


@dataclass(frozen=True)
class Learned:
    """The averaged networks, ready for `Amortised` and `LearnedTwist`, how it went, and the denoiser rows it took."""

    net: nn.Module
    denoiser: Denoiser
    baseline: nn.Module
    history: Sequence[Progress]
    rows: int


def fit_proposal(
    steering: Steering,
    net: nn.Module,
    as_denoiser: Callable[[nn.Module], Denoiser],
    *,
    plan: ProposalPlan,
    generator: Generator,
    baseline: nn.Module | None = None,
    objective: Objective | None = None,
    checkpoint: Path | None = None,
    watch: Callable[[Progress], None] | None = None,
    together: Gathers | None = None,
    about: Mapping[str, Any] | None = None,
) -> Learned:
    """Train `net`, which as_denoiser(net) makes the token law of a proposal, for the model and twist of `steering`.

    Begin from a copy of the model's own network. The `baseline` is F(x_t, t) unless given, the objective the variance
    of single steps. If the file `checkpoint` exists, the run goes on from there; one of another plan, seed, objective
    or model is refused, and `about` is what else it must agree with, such as the goal of the reward. Processes that
    train `together` walk paths of their own, each as many, and share their gradients; rows are counted for each,
    without those of the report of the end.
    """
    objective = StepVariance() if objective is None else objective
    model = steering.model
    if baseline is None:
        baseline = OfState(model.vocab_size, model.base.template.shape[-1]).to(model.device)
    student = _Student(steering, net, baseline, as_denoiser, plan, objective, generator)
    learning = Optimiser(
        nn.ModuleDict({"net": net.train(), "baseline": baseline.train()}),
        asdict(plan)
        | {"objective": described(objective), "network": described_net(net), "baseline": described_net(baseline)}
        | {**_asked(steering), **(about or {})},
        generator,
        plan.weight_decay,
        plan.clip,
        plan.average,
        faster=((baseline, plan.baseline_rate),),
    )
    run_rounds(student, learning, plan, checkpoint=checkpoint, watch=watch, together=together)
    best, judge = (part.eval().requires_grad_(False) for part in learning.average.module.children())
    return Learned(best, as_denoiser(best), judge, student.history, student.rows)


def _asked(steering: Steering) -> dict[str, Any]:
    """What can be told of the target without asking the reward: a checkpoint for another is not gone on from."""
    twist, told = steering.twist, asked(steering.model.base)
    if twist is None:
        return told
    return told | {
        "target's kl": twist.kl,
        "ramp": described(twist.ramp),
        "draws": twist.draws,
        "estimator": type(twist.estimator).__name__,
    }


def asked(model: Diffusion) -> dict[str, Any]:
    """What can be told of a model: how it samples, and its weights if it is known where they are."""
    network: object = getattr(model.denoiser, "network", None)
    return {
        "path's steps": len(model.steps),
        "path's times": digest(torch.tensor([step.t for step in model.steps], dtype=torch.float64)),
        "kernel": described(model.kernel),
        "template": digest(model.template),
        "model's weights": fingerprint(network.parameters()) if isinstance(network, nn.Module) else None,
    }


class _Student:
    """What learns: the networks, what they remember, and how they are doing."""

    def __init__(
        self,
        steering: Steering,
        net: nn.Module,
        baseline: nn.Module,
        as_denoiser: Callable[[nn.Module], Denoiser],
        plan: ProposalPlan,
        objective: Objective,
        generator: Generator,
    ) -> None:
        if steering.twist is None:
            raise ValueError("a proposal learns from a reward, and the steering has none: give it a Tilt")
        if objective.whole and (plan.times is not None or plan.last is not None):
            raise ValueError(f"{type(objective).__name__} looks at whole paths: leave out times and last of the plan")
        if getattr(steering.model.base.denoiser, "network", None) is net and any(
            p.requires_grad for p in net.parameters()
        ):
            raise ValueError("this is the model's own network, and p would move with q: give a copy (copy.deepcopy)")
        self.plan, self.objective, self.baseline, self.generator = plan, objective, baseline, generator
        self.as_denoiser, self.denoiser = as_denoiser, as_denoiser(net)
        self.own = replace(steering, proposal=Amortised(self.denoiser))
        self.model_alone = replace(steering, proposal=FromModel())
        self.memory: list[Paths] = []
        self.losses: list[Tensor] = []
        self.history: list[Progress] = []
        self.rows = 0
        self.newest: Paths | None = None

    def round(self, done: float, update: Callable[[], None]) -> None:
        batch = self.walk(self.generator)
        for _ in range(self.plan.updates):
            self.run_rounds(batch, self.plan.amount(done), self.generator)
            update()
        self.remember(batch)

    def walk(self, generator: Generator) -> list[Paths]:
        """New paths, of the proposal and of the model."""
        own = round(self.plan.on_policy * self.plan.paths)
        before, (other, since) = self._spent(), self._other(generator)
        with _half(self.own.model.device):
            batch = [
                replace(walk(steering, paths, generator, self.objective.twists), since=first)
                for steering, paths, first in ((self.own, own, None), (other, self.plan.paths - own, since))
                if paths
            ]
        self.rows += self._spent() - before
        self.newest = batch[0]
        return batch

    def _other(self, generator: Generator) -> tuple[Steering, Tensor | None]:
        """Who walks the paths that are not the proposal's, and the first of their steps that counts."""
        if not isinstance(self.objective, Returns):
            return self.model_alone, None
        steps, own = self.own.steps, self.own.proposal
        assert isinstance(own, Amortised)
        since = torch.randint(len(steps), (), generator=generator, device=generator.device)
        return replace(self.own, proposal=Late(own, steps[int(since)].t)), since

    def _spent(self) -> int:
        return sum(self.own.resources.spent()[name][0] for name in ("denoiser", "proposal"))

    def run_rounds(self, batch: Sequence[Paths], amount: float, generator: Generator) -> None:
        """Gather the gradients of one update."""
        batch = list(batch)
        if self.memory:
            index = int(torch.randint(len(self.memory), (1,), generator=generator, device=generator.device))
            batch.append(self.memory[index])
        total, all_paths = torch.zeros((), device=self.own.model.device), sum(len(paths) for paths in batch)
        for paths in batch:
            steps = self._steps(paths.num_steps, generator, 0 if paths.since is None else int(paths.since))
            before = self._spent()
            moves = Transitions(self.own.model, self.denoiser, paths.scaled(amount))
            lesson = Batch(moves, self.baseline, steps, self.plan.rows, self.plan.entropy, self.plan.kl)
            with _half(self.own.model.device):
                total = total + self.objective.backward(lesson, len(paths) / all_paths) * (len(paths) / all_paths)
            self.rows += self.objective.passes * len(steps) * len(paths) + self._spent() - before
        self.losses.append(total)

    def remember(self, batch: Sequence[Paths]) -> None:
        if self.plan.replay:
            self.memory = [*self.memory, *batch][-self.plan.replay :]

    def _steps(self, count: int, generator: Generator, since: int = 0) -> list[int]:
        """Which steps count in an update, in order."""
        first = since if self.plan.last is None else max(since, count - self.plan.last)
        if self.objective.whole or self.plan.times is None or self.plan.times >= count - first:
            return list(range(0 if self.objective.whole else first, count))
        order = torch.randperm(count - 1 - first, generator=generator, device=generator.device)
        return [*sorted(int(k) + first for k in order[: self.plan.times - 1]), count - 1]

    def report(self, step: int, done: float, seconds: float) -> Progress:
        loss = float(torch.stack(self.losses).mean())
        self.losses.clear()
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss is {loss} by round {step}: lower the rate, {self.plan.rate}")
        paths = self.newest
        assert paths is not None, "a report follows a round"
        log_w = paths.log_w
        reward = paths.log_twist[-1].double()
        divergence = reward - log_w  # log q - log p of the path, since its log-weight is r/kl + log p - log q
        share = float(ess(log_w.view(1, -1))) / len(paths)
        self.history.append(Progress(step, done, loss, seconds, share, float(reward.mean()), float(divergence.mean())))
        return self.history[-1]

    def conclude(self, average: nn.Module, step: int, done: float, seconds: float) -> Progress:
        net, baseline = average.children()
        draws = same_draws(self.generator)
        best = _Student(self.own, net, baseline, self.as_denoiser, self.plan, self.objective, draws)
        best.run_rounds(best.walk(draws), 1.0, draws)
        average.zero_grad()  # nothing is learned from this
        self.history.append(best.report(step, done, seconds))
        return self.history[-1]

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold besides the networks."""
        held = {name: value for i, paths in enumerate(self.memory) for name, value in paths.tensors(f"{i}.").items()}
        return held | ({"losses": torch.stack(self.losses)} if self.losses else {})

    def words(self) -> dict[str, Any]:
        return {"history": [asdict(entry) for entry in self.history], "rows": self.rows, "remembered": len(self.memory)}

    def recall(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        device = self.own.model.device
        self.history = [Progress(**entry) for entry in header.get("history", ())]
        self.rows = header.get("rows", 0)
        self.memory = [Paths.of(tensors, f"{i}.", device) for i in range(header.get("remembered", 0))]
        self.losses = list(tensors["losses"].to(device)) if "losses" in tensors else []


def _half(device: torch.device) -> torch.autocast:
    """bf16 on a GPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
