"""What every training of a proposal shares: its plan, walking paths, reports, held-out paths, checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Generator, Tensor, nn

from tokensteer.core.models.denoiser import Denoiser
from tokensteer.core.numerics.domains import check_numbers, check_wholes
from tokensteer.core.particles.resampling import ess
from tokensteer.core.proposals.amortised import Amortised
from tokensteer.core.proposals.proposal import FromModel
from tokensteer.core.steering.steering import Steering
from tokensteer.train.frozen import changing, restore
from tokensteer.train.held_out import HeldOut, held_out, proposal_rows
from tokensteer.train.optim import Pace, half_precision, same_draws
from tokensteer.train.paths import Paths, walk
from tokensteer.train.rounds import Report, Trainee


@dataclass(frozen=True)
class ProposalPlan(Pace):
    """How long, how fast, and from what to train.

    A round walks `paths`, a share `on_policy` of them with the proposal and the rest with the model (for `Returns`, up
    to a random time), and makes `updates` from them. The last `replay` sets of paths are remembered (a round that mixes
    makes two), and an update takes one of them at random besides the newest. An update uses `times` random steps, all
    if None, of the `last` ones, and always the very last.
    With `held_out`, the averaged proposal walks so many other paths, always from the same seed, at each report, and the
    best of the reports is returned.
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
    held_out: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wholes("ProposalPlan", 1, rounds=self.rounds, paths=self.paths, updates=self.updates)
        check_wholes("ProposalPlan", 1, times=self.times, last=self.last, rows=self.rows)
        check_wholes("ProposalPlan", 0, replay=self.replay, held_out=self.held_out)
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
    whole paths. The last report is of the averaged networks, on new paths that they walked. `held_out` is of the
    averaged proposal."""

    ess: float
    reward: float
    divergence: float
    held_out: HeldOut | None = None


class Aim(Protocol):
    """What is made small. `twists`: it needs log-twists on the way; `whole`: it needs all steps of a path."""

    @property
    def twists(self) -> bool: ...
    @property
    def whole(self) -> bool: ...


AimT = TypeVar("AimT", bound=Aim)


@dataclass(eq=False)
class ProposalTrainee(Trainee[Progress], Generic[AimT]):
    """Walks paths with the proposal and with the model, and remembers some of them in `memory`."""

    steering: Steering
    net: nn.Module
    baseline: nn.Module
    as_denoiser: Callable[[nn.Module], Denoiser]
    plan: ProposalPlan
    objective: AimT
    generator: Generator
    entry: type[Progress] = field(default=Progress, init=False)
    memory: list[Paths] = field(default_factory=list[Paths], init=False)
    newest: Paths | None = field(default=None, init=False)
    best: HeldOut | None = field(default=None, init=False)
    kept: dict[str, Tensor] = field(default_factory=dict[str, Tensor], init=False)

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
        return self.model_alone, None

    @abstractmethod
    def _backward(self, batch: Sequence[Paths], amount: float) -> None:
        """Accumulate the gradients of one update, from paths with the reward multiplied by `amount`."""

    def _spent(self) -> int:
        return proposal_rows(self.own)

    def report(self, average: nn.Module, step: int, done: float, seconds: float) -> Progress:
        report = self._of_newest(step, done, seconds)
        return self._compared(average, report) if self.plan.held_out else report

    def _of_newest(self, step: int, done: float, seconds: float) -> Progress:
        paths = self.newest
        assert paths is not None, "a report follows a round"
        loss, reward = float(torch.stack(self.losses).mean()), paths.log_twist[-1].double()
        divergence = reward - paths.log_w  # log q - log p of the path, since its log-weight is r/kl + log p - log q
        log_w = paths.log_w.view(self.own.model.populations, -1)  # each has a normaliser of its own
        share = float(ess(log_w).mean()) / log_w.shape[1]
        return Progress(step, done, loss, seconds, share, float(reward.mean()), float(divergence.mean()))

    def _compared(self, average: nn.Module, report: Progress) -> Progress:
        """The report with the averaged proposal on held-out paths; networks are kept if they are the best so far."""
        net, _ = average.children()
        own = replace(self.steering, proposal=Amortised(self.as_denoiser(net)))
        found = held_out(own, self.plan.held_out, self.generator)
        self.rows += found.rows
        report = replace(report, held_out=found)
        if self.best is None or found.beats(self.best):
            self.best = found
            self.kept = {name: value.clone() for name, value in changing(average).items()}
        return report

    def conclude(self, average: nn.Module, step: int, done: float, seconds: float) -> Progress:
        report = self._of_average(average, step, done, seconds)
        if not self.plan.held_out:
            return report
        report = self._compared(average, report)
        if self.best is report.held_out:
            return report
        restore(changing(average), self.kept)
        return replace(self._of_average(average, step, done, seconds), held_out=self.best)

    def _of_average(self, average: nn.Module, step: int, done: float, seconds: float) -> Progress:
        net, baseline = average.children()
        best = replace(self, net=net, baseline=baseline, generator=same_draws(self.generator))
        best._backward(best._walk(), 1.0)
        average.zero_grad()  # measured, not trained
        return best._of_newest(step, done, seconds)

    def tensors(self) -> dict[str, Tensor]:
        remembered = (paths.tensors(f"{i}.") for i, paths in enumerate(self.memory))
        best = {f"best.{name}": value for name, value in self.kept.items()}
        return {name: value for tensors in (super().tensors(), *remembered, best) for name, value in tensors.items()}

    def header(self) -> dict[str, Any]:
        best = None if self.best is None else asdict(self.best)
        return super().header() | {"remembered": len(self.memory), "best": best}

    def restore(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        super().restore(tensors, header)
        found = [entry.get("held_out") for entry in header.get("history", ())]
        self.history = [
            replace(entry, held_out=None if held is None else HeldOut(**held))
            for entry, held in zip(self.history, found, strict=True)
        ]
        self.memory = [Paths.of(tensors, f"{i}.") for i in range(header.get("remembered", 0))]
        best = header.get("best")
        self.best = None if best is None else HeldOut(**best)
        self.kept = {n.removeprefix("best."): value for n, value in tensors.items() if n.startswith("best.")}
