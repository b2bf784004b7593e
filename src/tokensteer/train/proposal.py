"""Training of a proposal, and with it of a twist, from paths that it walks itself.

Each round walks paths with the proposal as it is (and a share of them with the model), and makes a few updates from
them and from remembered paths of earlier rounds. The weights of a sampler always include log p - log q, so that a badly
trained proposal costs effective sample size and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from tokensteer.core.models.denoiser import Denoiser
from tokensteer.core.numerics.domains import check_numbers, check_wholes
from tokensteer.core.particles.resampling import ess
from tokensteer.core.proposals.amortised import Amortised
from tokensteer.core.proposals.proposal import FromModel
from tokensteer.core.steering.steering import Steering
from tokensteer.train.baselines import OfState
from tokensteer.train.objectives import Batch, Objective, Returns, StepVariance
from tokensteer.train.optim import Pace, described, described_model, described_net, half_precision, same_draws
from tokensteer.train.paths import Late, Paths, Transitions, walk
from tokensteer.train.rounds import Gathers, Report, Trainee, run_rounds


@dataclass(frozen=True)
class ProposalPlan(Pace):
    """How long, how fast, and from what to train.

    A round walks `paths`, a share `on_policy` of them with the proposal and the rest with the model (for `Returns`, up
    to a random time), and makes `updates` from them. The last `replay` sets of paths are remembered (a round that mixes
    makes two), and an update takes one of them at random besides the newest. An update uses `times` random steps, all
    if None, of the `last` ones, and always the very last.
    The reward grows to its full size over a share `anneal` of the run. The rate of the baseline is `baseline_rate`
    times that of the network: its values have to reach the size of log-weights.
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
    baseline_rate: float = 10.0
    rows: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wholes("ProposalPlan", 1, rounds=self.rounds, paths=self.paths, updates=self.updates)
        check_wholes("ProposalPlan", 1, times=self.times, last=self.last, rows=self.rows)
        check_wholes("ProposalPlan", 0, replay=self.replay)
        check_numbers("ProposalPlan", "[0, 1]", on_policy=self.on_policy, anneal=self.anneal)
        check_numbers("ProposalPlan", "(0, inf)", baseline_rate=self.baseline_rate)
        check_numbers("ProposalPlan", "[0, inf)", entropy=self.entropy, kl=self.kl)

    @property
    def total(self) -> int:
        return self.rounds

    def amount(self, done: float) -> float:
        """The factor of the reward when a share `done` of the run is over."""
        return 1.0 if done >= self.anneal else (done + 1.0 / self.rounds) / (self.anneal + 1.0 / self.rounds)


@dataclass(frozen=True)
class Progress(Report):
    """The state of a training: the mean loss since the last report, and of the newest paths of the proposal (of the
    model, if it walks them all) the effective sample size over their number, the mean of reward/kl, and KL(q | p) of
    whole paths. The last report is of the averaged networks, on new paths that they walked."""

    ess: float
    reward: float
    divergence: float


@dataclass(frozen=True)
class Learned:
    """The averaged networks, for `Amortised` and `LearnedTwist`, the reports, and the number of denoiser rows."""

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
    """Train `net`, from which as_denoiser(net) makes a proposal's denoiser, for the model and twist of `steering`.

    Begin with a copy of the model's network. The default baseline is `OfState`, the default objective `StepVariance`.
    If the file `checkpoint` exists, the run resumes from it; ValueError if it was written with another plan, seed,
    objective, model or `about`, such as the goal of the reward. Processes that train `together` walk `paths` each and
    average their gradients; rows are counted for each, without those of the last report.
    """
    objective, model, twist = StepVariance() if objective is None else objective, steering.model, steering.twist
    if twist is None:
        raise ValueError("a proposal learns from a reward, and the steering has none: give it a Tilt")
    if baseline is None:
        baseline = OfState(model.vocab_size, model.base.template.shape[-1]).to(model.device)
    trainee = ProposalTrainee(steering, net, baseline, as_denoiser, plan, objective, generator)
    given = {
        "objective": described(objective),
        "network": described_net(net),
        "baseline": described_net(baseline),
        **described_model(model.base),
        "target's kl": twist.kl,
        "ramp": described(twist.ramp),
        "draws": twist.draws,
        "estimator": type(twist.estimator).__name__,
        **(about or {}),
    }
    nets, faster = nn.ModuleDict({"net": net, "baseline": baseline}), ((baseline, plan.baseline_rate),)
    average = run_rounds(
        trainee, nets, plan, given, generator, faster=faster, checkpoint=checkpoint, watch=watch, together=together
    )
    best, value = average.requires_grad_(False).children()
    return Learned(best, as_denoiser(best), value, trainee.history, trainee.rows)


@dataclass(eq=False)
class ProposalTrainee(Trainee[Progress]):
    """A round walks paths and makes updates from them and from those in `memory`."""

    steering: Steering
    net: nn.Module
    baseline: nn.Module
    as_denoiser: Callable[[nn.Module], Denoiser]
    plan: ProposalPlan
    objective: Objective
    generator: Generator
    entry: type[Progress] = field(default=Progress, init=False)
    memory: list[Paths] = field(default_factory=list[Paths], init=False)
    newest: Paths | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.objective.whole and (self.plan.times is not None or self.plan.last is not None):
            raise ValueError(f"{type(self.objective).__name__} needs whole paths: leave out times and last of the plan")
        own = getattr(self.steering.model.base.denoiser, "network", None) is self.net
        if own and any(p.requires_grad for p in self.net.parameters()):
            raise ValueError("this is the model's own network, and p would change with q: give a copy (copy.deepcopy)")
        self.denoiser = self.as_denoiser(self.net)
        self.proposal = Amortised(self.denoiser)
        self.own = replace(self.steering, proposal=self.proposal)
        self.model_alone = replace(self.steering, proposal=FromModel())

    def round(self, done: float, update: Callable[[], None]) -> None:
        batch = self._walk()
        for _ in range(self.plan.updates):
            self._backward(batch, self.plan.amount(done))
            update()
        if self.plan.replay:
            self.memory = [*self.memory, *batch][-self.plan.replay :]

    def _walk(self) -> list[Paths]:
        """New paths, of the proposal and of the model."""
        own = round(self.plan.on_policy * self.plan.paths)
        before, (other, since) = self._spent(), self._other()
        with half_precision(self.own.model.device):
            batch = [
                replace(walk(steering, paths, self.generator, self.objective.twists), since=first)
                for steering, paths, first in ((self.own, own, None), (other, self.plan.paths - own, since))
                if paths
            ]
        self.rows += self._spent() - before
        self.newest = batch[0]
        return batch

    def _other(self) -> tuple[Steering, Tensor | None]:
        """The sampler of the paths that are not the proposal's, and the first of their steps that counts."""
        if not isinstance(self.objective, Returns):
            return self.model_alone, None
        steps = self.own.steps
        since = torch.randint(len(steps), (), generator=self.generator, device=self.generator.device)
        return replace(self.own, proposal=Late(self.proposal, steps[int(since)].t)), since

    def _spent(self) -> int:
        return sum(self.own.resources.spent()[name][0] for name in ("denoiser", "proposal"))

    def _backward(self, batch: Sequence[Paths], amount: float) -> None:
        """Accumulate the gradients of one update."""
        batch = list(batch)
        if self.memory:
            place = torch.randint(len(self.memory), (1,), generator=self.generator, device=self.generator.device)
            batch.append(self.memory[int(place)])
        total, all_paths = torch.zeros((), device=self.own.model.device), sum(len(paths) for paths in batch)
        for paths in batch:
            steps = self._steps(paths.num_steps, 0 if paths.since is None else int(paths.since))
            before, share = self._spent(), len(paths) / all_paths
            moves = Transitions(self.own.model, self.denoiser, paths.scaled(amount))
            part = Batch(moves, self.baseline, steps, self.plan.rows, self.plan.entropy, self.plan.kl)
            with half_precision(self.own.model.device):
                total = total + self.objective.backward(part, share) * share
            self.rows += self.objective.passes * len(steps) * len(paths) + self._spent() - before
        self.losses.append(total)

    def _steps(self, count: int, since: int = 0) -> list[int]:
        """The steps of an update, in order."""
        first = since if self.plan.last is None else max(since, count - self.plan.last)
        if self.objective.whole or self.plan.times is None or self.plan.times >= count - first:
            return list(range(0 if self.objective.whole else first, count))
        order = torch.randperm(count - 1 - first, generator=self.generator, device=self.generator.device)
        return [*sorted(int(k) + first for k in order[: self.plan.times - 1]), count - 1]

    def report(self, step: int, done: float, seconds: float) -> Progress:
        paths = self.newest
        assert paths is not None, "a report follows a round"
        loss, reward = float(torch.stack(self.losses).mean()), paths.log_twist[-1].double()
        divergence = reward - paths.log_w  # log q - log p of the path, since its log-weight is r/kl + log p - log q
        share = float(ess(paths.log_w.view(1, -1))) / len(paths)
        return Progress(step, done, loss, seconds, share, float(reward.mean()), float(divergence.mean()))

    def conclude(self, average: nn.Module, step: int, done: float, seconds: float) -> Progress:
        net, baseline = average.children()
        best = replace(self, net=net, baseline=baseline, generator=same_draws(self.generator))
        best._backward(best._walk(), 1.0)
        average.zero_grad()  # measured, not trained
        return best.report(step, done, seconds)

    def tensors(self) -> dict[str, Tensor]:
        remembered = (paths.tensors(f"{i}.") for i, paths in enumerate(self.memory))
        return {name: value for tensors in (super().tensors(), *remembered) for name, value in tensors.items()}

    def header(self) -> dict[str, Any]:
        return super().header() | {"remembered": len(self.memory)}

    def restore(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        super().restore(tensors, header)
        self.memory = [Paths.of(tensors, f"{i}.") for i in range(header.get("remembered", 0))]
