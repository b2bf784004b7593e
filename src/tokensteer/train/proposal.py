"""Training of a proposal, and with it of a twist, from paths that it walks itself.

Each round walks paths with the proposal as it is (and a share of them with the model), and makes a few updates from
them and from remembered paths of earlier rounds. The weights of a sampler always include log p - log q, so that a badly
trained proposal costs effective sample size and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from tokensteer.core.models.denoiser import Denoiser
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.steering.steering import Steering
from tokensteer.train.baselines import OfState
from tokensteer.train.likelihood import Likelihood, LikelihoodTrainee
from tokensteer.train.objectives import Batch, Objective, PathVariance, Returns, StepVariance
from tokensteer.train.optim import described, described_model, described_net, half_precision
from tokensteer.train.paths import Late, Paths, Transitions
from tokensteer.train.proposal_trainee import Progress, ProposalPlan, ProposalTrainee
from tokensteer.train.rounds import Gathers, run_rounds


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
    objective: Objective | Likelihood | None = None,
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
    _check_objective(objective, model.base, plan)
    if isinstance(objective, Likelihood):
        trainee = LikelihoodTrainee(steering, net, baseline, as_denoiser, plan, objective, generator)
    else:
        trainee = PathTrainee(steering, net, baseline, as_denoiser, plan, objective, generator)
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


def _check_objective(objective: Objective | Likelihood, model: Diffusion, plan: ProposalPlan) -> None:
    """Raise if an objective cannot learn from so many paths, or from populations that differ in their context."""
    contexts = max((len(part) for part in model.conditions), default=1)
    if contexts > 1 and not isinstance(objective, PathVariance | Likelihood):
        raise ValueError(
            f"{type(objective).__name__} has a baseline or a twist of the state, which does not tell {contexts} "
            "contexts apart: use PathVariance or Likelihood"
        )
    own = round(plan.on_policy * plan.paths)
    fewest = min((count for count in (own, plan.paths - own) if count), default=0)
    if isinstance(objective, PathVariance) and fewest < 2 * model.populations:
        raise ValueError(
            f"PathVariance compares the paths of a population, and {fewest} paths of {model.populations} populations "
            f"are fewer than two of each: let paths be {2 * model.populations} or more"
        )


@dataclass(eq=False)
class PathTrainee(ProposalTrainee[Objective]):
    """A round walks paths and makes updates from them and from those in `memory`."""

    def round(self, done: float, update: Callable[[], None]) -> None:
        batch = self._walk()
        for _ in range(self.plan.updates):
            self._backward(batch, self.plan.amount(done))
            update()
        if self.plan.replay:
            self.memory = [*self.memory, *batch][-self.plan.replay :]

    def _other(self) -> tuple[Steering, Tensor | None]:
        if not isinstance(self.objective, Returns):
            return super()._other()
        steps = self.own.steps
        since = torch.randint(len(steps), (), generator=self.generator, device=self.generator.device)
        return replace(self.own, proposal=Late(self.proposal, steps[int(since)].t)), since

    def _backward(self, batch: Sequence[Paths], amount: float) -> None:
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
