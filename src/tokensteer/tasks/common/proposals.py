"""Learned proposals and twists: one course for all tasks, which gives each its networks, plans and goals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from tokensteer.core.models.denoiser import Denoiser
from tokensteer.core.numerics.domains import check_numbers, check_wholes
from tokensteer.core.proposals.amortised import Amortised, OtherHead
from tokensteer.core.steering.methods import Method, prop_amot, smc_amot, smc_base, smc_grad
from tokensteer.core.steering.steering import Steering
from tokensteer.files import write_json
from tokensteer.tasks.common.learned import bring, complete, find, fingerprint, goal_option, named, with_twist
from tokensteer.tasks.common.objectives import (
    NO_BASELINE,
    NONE,
    OBJECTIVES,
    RETURNS,
    STATE,
    TWISTS,
    Aim,
    check_kind,
    check_pair,
    make_baseline,
)
from tokensteer.tasks.common.task import Setup, Task, Trained, weights_file
from tokensteer.tasks.common.training import Training, measure_methods, say
from tokensteer.tasks.nets import ValueConfig, load, save
from tokensteer.train import (
    Balance,
    DrakesPlan,
    Learned,
    Likelihood,
    ProposalPlan,
    Report,
    choose_scale,
    fit_proposal,
    shown,
)
from tokensteer.train.accepted import Accepted
from tokensteer.train.frozen import state

WEIGHTED = "weighted samples of every method, prop-amot too: without resampling, that is importance sampling"

STEPWISE = ProposalPlan(
    80,
    paths=128,
    updates=4,
    times=12,
    replay=4,
    rate=3e-4,
    baseline_rate=3.0,
    average=0.95,
    report_every=2,
    save_every=20,
)
"""A plan for `StepVariance` on a GPU, which the larger tasks vary."""
TWIST = replace(
    STEPWISE,
    rounds=100,
    paths=256,
    on_policy=0.5,
    updates=16,
    times=8,
    replay=16,
    rate=1e-3,
    baseline_rate=1.0,
    average=0.999,
)
"""A plan for the twist of a finished proposal on a GPU."""


@dataclass(frozen=True)
class ProposalConfig:
    """How the proposal of a task is trained: at `kl`, in `num_steps`, which may be fewer than it is used with because
    no network reads the time. `value` is the network of the baseline, which `Balance` makes a learned twist. With other
    objectives the plan `twist` trains one afterwards, by the objective `twist_by`, on paths of the finished proposal:
    in place of the tilt's own estimates, or added to them if `value.beside`. Parameters whose names begin with one of
    `frozen` keep the denoiser's values and are stored with the denoiser only. `baseline` names another one than
    `value`, and `options` are the words that chose it. `among` names the objectives that will do, if not all, and
    `sampled` is the plan of `Likelihood`, if not made of `plan`."""

    plan: ProposalPlan
    objective: Aim
    value: ValueConfig
    kl: float = 1.0
    num_steps: int = 50
    twist: ProposalPlan | None = None
    twist_by: str = RETURNS
    frozen: tuple[str, ...] = ()
    baseline: str = STATE
    options: str = ""
    among: tuple[str, ...] = ()
    sampled: ProposalPlan | None = None

    def __post_init__(self) -> None:
        check_numbers("ProposalConfig", "(0, inf)", kl=self.kl)
        check_wholes("ProposalConfig", 1, num_steps=self.num_steps)
        if self.value.beside and isinstance(self.objective, Balance):
            raise ValueError("ProposalConfig: Balance learns a whole twist, so value.beside must be False")

    def chosen(self, objective: str | None, baseline: str | None) -> ProposalConfig:
        """The same with an objective and a baseline by name, the task's own for None."""
        if self.among and (objective not in (None, *self.among) or baseline is not None):
            raise ValueError(
                f"this task's proposal is learned by {' or '.join(self.among)}: give --objective one of these or "
                "leave it out, and leave out --baseline"
            )
        check_kind(objective, twist=False)
        own = isinstance(self.objective, Balance) and objective == "balance"
        aim = self.objective if objective is None or own else OBJECTIVES[objective]
        check_pair(aim, baseline)
        named = (("objective", objective), ("baseline", baseline))
        return replace(
            self,
            objective=aim,
            baseline=NONE if isinstance(aim, NO_BASELINE) else baseline or self.baseline,
            plan=self.sampled if self.sampled and isinstance(aim, Likelihood) else _fitting(self.plan, aim),
            value=replace(self.value, beside=False) if isinstance(aim, Balance) else self.value,
            options="".join(f" --{name} {value}" for name, value in named if value is not None),
        )

    def chosen_twist(self, objective: str | None) -> ProposalConfig:
        """The same with an objective of the twist by name, the task's own for None."""
        check_kind(objective, twist=True)
        return self if objective is None else replace(self, twist_by=objective, options=f" --objective {objective}")


def _fitting(plan: ProposalPlan, aim: Aim) -> ProposalPlan:
    """The plan as an objective needs it: all steps of whole paths, or many small updates from many samples."""
    if isinstance(aim, Likelihood):
        return replace(plan, updates=50, replay=24)
    return replace(plan, times=None, last=None) if not isinstance(aim, Accepted) and aim.whole else plan


@dataclass(frozen=True)
class ProposalTraining:
    """What a task gives to train a proposal for a `goal` from the networks in the folder `weights`, by the task's own
    reward or the `reward` of that name.

    `populations` are measured for each number of particles. trainee(file, device) loads the copy of the denoiser that
    is trained; `as_used` replaces `as_denoiser` if the trained network is used in another form. `prompts` returns those
    whose paths are learned from, if not the task's own. What was learned is measured in `steps` steps.
    """

    make: Callable[[Setup], Task]
    goal: int | None
    weights: Path
    config: ProposalConfig
    as_denoiser: Callable[[nn.Module], Denoiser]
    populations: Mapping[int, int]
    trainee: Callable[[Path, str], nn.Module] = load
    as_used: Callable[[nn.Module], Denoiser | OtherHead] | None = None
    reward: str | None = None
    steps: int = 100
    prompts: Callable[[ProposalConfig], tuple[str, ...]] | None = None

    def rewarded(self, reward: str, kl: float, own: bool = False) -> ProposalTraining:
        """The same for a reward of the task by name, at its kl; `own` is the one that it has anyway."""
        config = replace(self.config, kl=kl, options=f"{self.config.options} --reward {reward}")
        return replace(self, reward=None if own else reward, config=config)

    def at(self, kl: float) -> ProposalTraining:
        """The same at another kl."""
        return replace(self, config=replace(self.config, kl=kl, options=f"{self.config.options} --kl {kl:g}"))

    def train(self, training: Training, twist: bool = False) -> dict[str, Any]:
        """Train, store and measure a proposal, or a `twist` for the finished proposal in `weights`. Everything else
        that the task needs is copied to the folder. The card is written and returned."""
        if twist and self.config.twist is None and not isinstance(self.config.objective, Balance):
            raise ValueError("this task has no twist to learn: use its proposal, by smc-amot")
        training.seed_torch()  # what is learned may begin at random
        prompts = None if self.prompts is None else self.prompts(self.config)
        task, config = self._task(training, self.config.num_steps, prompts), self.config
        if twist:
            if config.twist is None:
                raise ValueError(f"the twist of {task.name} is learned with its proposal: give --proposal instead")
            plan, net = training.rounds(config.twist), self._finished(task.name, training)
            config = replace(config, objective=TWISTS[config.twist_by](config.value.beside), baseline=STATE)
        else:
            plan, net = training.rounds(config.plan), self.copy_to_train(task.name, training.device)
            complete(training, self.weights, task.name)
        learned = self._fit(task, net, config, plan, training, "twist" if twist else "proposal")
        nets = {"proposal": learned.net, "value": learned.baseline}
        if twist:
            del nets["proposal"]
        elif not isinstance(config.objective, Balance):
            del nets["value"]  # other baselines are no twists
            for suffix in (".safetensors", ".json"):  # the twist of an older proposal does not fit this one
                self._file(training.out, task.name, "value").with_suffix(suffix).unlink(missing_ok=True)
        files = [self._file(training.out, task.name, part) for part in nets]
        for file, (part, trained) in zip(files, nets.items(), strict=True):
            without = [name for name in state(trained) if part == "proposal" and name.startswith(config.frozen)]
            save(trained, file, torch.bfloat16, without)
        card = self._card(task.name, training, plan, config, learned, twist)
        if not twist:
            card |= self.held_out_entries(task, learned.denoiser, plan, training)
        card |= {} if task.reward is None else {"reward": task.reward}
        if prompts is not None:
            card |= {"prompts": len(prompts), "data": f"{len(prompts)} prompts; {card['data']}"}
        for file in files:  # without "quality": see `finished`
            write_json(file.with_suffix(".json"), card)
        say("measuring")
        card["quality"] = self._measure(training)
        for file in files:
            write_json(file.with_suffix(".json"), card)
        training.tidy(self._file(training.out, task.name, "twist" if twist else "proposal").name)
        return card

    def held_out_entries(
        self, task: Task, denoiser: Denoiser, plan: ProposalPlan, training: Training
    ) -> dict[str, Any]:
        """Entries of the card: how much of what was learned counts, chosen on held-out paths."""
        say("choosing the scale")
        steering, paths = Steering(task.model, task.tilt), 4 * plan.paths
        best, found = choose_scale(steering, Amortised(denoiser), paths, training.generator())
        tried = {f"{scale:g}": rounded(asdict(trial)) for scale, trial in found.items()}
        return {"scale": best, "held-out paths": paths, "scales": tried}

    def _task(self, training: Training, num_steps: int, prompt: tuple[str, ...] | None = None) -> Task:
        setup = Setup(num_steps, self.goal, self.config.kl, device=training.device, weights=self.weights)
        return self.make(replace(setup, reward=self.reward, prompt=prompt))

    def _file(self, folder: Path, name: str, part: str) -> Path:
        return weights_file(folder, name, named(part, self.reward), self.goal)

    def copy_to_train(self, name: str, device: str) -> nn.Module:
        """A copy of the denoiser whose parameters are trained, all but the frozen ones."""
        net = self.trainee(weights_file(self.weights, name, "denoiser"), device)
        for parameter, values in net.named_parameters():
            values.requires_grad_(not parameter.startswith(self.config.frozen))
        return net

    def _finished(self, name: str, training: Training) -> nn.Module:
        """The finished proposal, brought to the folder with everything it needs."""
        file = self._file(self.weights, name, "proposal")
        if not file.is_file():
            asked = goal_option(self.goal) + ("" if self.reward is None else f" --reward {self.reward}")
            raise FileNotFoundError(f"there is no {file}: train it by tokensteer train {name} --proposal{asked} first")
        complete(training, self.weights, name)
        for suffix in (".safetensors", ".json"):
            bring(self._file(self.weights, name, "proposal").with_suffix(suffix), training.out)
        rest = weights_file(training.out, name, "denoiser")
        return load(self._file(training.out, name, "proposal"), training.device, rest)

    def _fit(
        self, task: Task, net: nn.Module, config: ProposalConfig, plan: ProposalPlan, training: Training, part: str
    ) -> Learned:
        if isinstance(config.objective, Accepted):
            raise NotImplementedError(
                f"{task.name} has no sequences to accept: give --objective step-variance, or a training that has some"
            )
        needed = (self._file(self.weights, task.name, "proposal"),) if part == "twist" else ()
        about = {} if task.reward is None else {"reward": task.reward}
        if self.prompts is not None and task.prompted is not None:
            about |= {"prompts": [prompt.text for prompt in task.prompted.prompts]}
        training.seed_torch()
        with shown(f"{task.name} {part}") as watch:
            return fit_proposal(
                Steering(task.model, task.tilt),
                net,
                self.as_denoiser,
                plan=plan,
                generator=training.generator(),
                baseline=make_baseline(config.baseline, config.value, task.model.steps).to(training.device),
                objective=config.objective,
                checkpoint=self._file(training.checkpoints, task.name, part),
                watch=watch,
                about=about | {"goal": self.goal, "weights": fingerprint(self.weights, task.name, *needed)},
            )

    def _card(
        self, name: str, training: Training, plan: ProposalPlan, config: ProposalConfig, learned: Learned, twist: bool
    ) -> dict[str, Any]:
        what = f"learned proposal of the task {name}, and its baseline: a twist, if it was learned by Balance"
        if twist:
            what = f"learned twist of the task {name}, for its learned proposal"
        command = (
            f"tokensteer train {name} --{'twist' if twist else 'proposal'}{goal_option(self.goal)}{config.options}"
        )
        sizes = (("proposal", learned.net), ("value", learned.baseline))
        return {
            **taught_card(training, what, command, self.goal, config.num_steps, plan, learned.history, learned.rows),
            "kl": config.kl,
            "objective": repr(config.objective),
            "baseline": config.baseline,
            "parameters": {part: sum(p.numel() for p in net.parameters()) for part, net in sizes},
            "quality of": WEIGHTED,
        }

    def _measure(self, training: Training) -> dict[str, Any]:
        """All methods at the same target, with the stored networks. Samples of prop-amot are weighted too."""
        task = self._task(training, self.steps)
        used = self.as_used or self.as_denoiser
        trained = find(training.out, task.name, self.goal, used, training.device, self.reward)
        compared = {"smc-base": smc_base(task.model, task.tilt), "smc-grad": smc_grad(task.model, task.tilt)}
        compared |= learned_methods(task, trained)
        return {name: found for name, _, found in measure_methods(task, compared, self.populations, training)}


def learned_methods(task: Task, trained: Trained) -> dict[str, Method]:
    """The methods that use the learned networks."""
    q = trained.proposal
    found = {"prop-amot": prop_amot(task.model, task.tilt, q), "smc-amot": smc_amot(task.model, task.tilt, q)}
    if trained.value is not None:
        found["smc-learned"] = smc_amot(task.model, with_twist(task.tilt, trained), q)
    return found


def taught_card(
    training: Training,
    what: str,
    command: str,
    goal: int | None,
    num_steps: int,
    plan: ProposalPlan | DrakesPlan,
    history: Sequence[Report],
    rows: int,
) -> dict[str, Any]:
    """The card of a network that was trained on its own paths."""
    every = max(1, math.ceil(len(history) / 100))  # at most a hundred reports, the last among them
    return {
        **training.card(what, command, "no data: paths of the task's own denoiser, judged by its reward"),
        "goal": goal,
        "steps of a path": num_steps,
        "rounds": history[-1].step,
        "seconds": round(history[-1].seconds, 1),
        "denoiser rows": rows,
        "plan": asdict(plan),
        "history": [rounded(asdict(report)) for report in history[::-1][::every][::-1]],
    }


def rounded(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """For JSON, which has no NaN."""
    return {name: _rounded_one(value) for name, value in numbers.items()}


def _rounded_one(value: Any) -> Any:
    if isinstance(value, dict):
        return rounded(cast("dict[str, Any]", value))
    return round(value, 5) if value is not None and math.isfinite(value) else None
