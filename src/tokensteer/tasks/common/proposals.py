"""Learned proposals and twists of the tasks: how they are trained and measured."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Generator, nn

from tokensteer.core.models.denoiser import Denoiser
from tokensteer.core.numerics.domains import check_numbers, check_wholes
from tokensteer.core.proposals.amortised import Amortised
from tokensteer.core.steering.methods import Method, prop_amot, smc_amot, smc_base, smc_grad
from tokensteer.core.steering.steering import Steering
from tokensteer.files import write_json
from tokensteer.tasks.common.learned import PARTS, bring, complete, contents, file_of, find, suffix, towards, with_twist
from tokensteer.tasks.common.task import Task, Trained
from tokensteer.tasks.common.training import Training, say
from tokensteer.tasks.nets import ValueConfig, ValueNet, load, save
from tokensteer.tasks.nets.store import Net
from tokensteer.train import Balance, Learned, Objective, Progress, ProposalPlan, Returns, Tuning, fit_proposal, shown

WEIGHTED = "weighted samples of every method, prop-amot too: without resampling, that is importance sampling"

TWIST = ProposalPlan(
    100,
    paths=256,
    on_policy=0.5,
    updates=16,
    times=8,
    replay=16,
    rate=1e-3,
    baseline_rate=1.0,
    average=0.999,
    report_every=2,
    save_every=20,
)
"""How a twist is taught to a finished proposal on a GPU."""

Report = TypeVar("Report", Progress, Tuning)


@dataclass(frozen=True)
class ProposalConfig:
    """How the proposal of a task is trained: at `kl`, in `num_steps`, fewer than it is used with since no network is
    told the time. `value` is the network of the baseline, which under `Balance` is a learned twist. Otherwise one can
    be taught afterwards, by `twist`, from the paths of the finished proposal: instead of the tilt's own estimates, or
    what goes `beside` them if `value` says so. Parameters called `frozen` stay those of the denoiser and are stored
    with it alone."""

    plan: ProposalPlan
    objective: Objective
    value: ValueConfig
    kl: float = 1.0
    num_steps: int = 50
    twist: ProposalPlan | None = None
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_numbers("ProposalConfig", "(0, inf)", kl=self.kl)
        check_wholes("ProposalConfig", 1, num_steps=self.num_steps)
        if self.value.beside and isinstance(self.objective, Balance):
            raise ValueError("ProposalConfig: what Balance learns is a whole twist, and goes beside nothing")


def _as_long(plan: ProposalPlan, training: Training) -> ProposalPlan:
    """A course's plan in the time that was given, or so many times as long."""
    if training.minutes is not None:
        return replace(plan, rounds=10**9, seconds=60.0 * training.minutes)
    return replace(plan, rounds=max(1, round(plan.rounds * training.scale)))


def methods(task: Task, trained: Trained) -> dict[str, Method]:
    """What the learned networks are good for."""
    q = Amortised(trained.denoiser)
    found = {"prop-amot": prop_amot(task.model, task.tilt, q), "smc-amot": smc_amot(task.model, task.tilt, q)}
    if trained.value is not None:
        found["smc-learned"] = smc_amot(task.model, with_twist(task.tilt, trained), q)
    return found


def teach(
    make: Callable[[float | None, int], Task],
    net: nn.Module,
    as_denoiser: Callable[[nn.Module], Denoiser],
    course: ProposalConfig,
    training: Training,
    goal: int | None,
    populations: Mapping[int, int],
    weights: Path,
    as_used: Callable[[nn.Module], Denoiser] | None = None,
) -> dict[str, Any]:
    """Train, store, measure. make(kl, num_steps) gives the task, `net` is a copy of its denoiser, `populations` are
    measured for each number of particles, with as_used(net) if it is used in another form than it is trained. All that
    the task needs besides is copied from the folder `weights`. The card is returned and written."""
    learner = make(course.kl, course.num_steps)
    out, name = training.out, learner.name
    complete(training, weights, name)
    plan = _as_long(course.plan, training)
    about = {"goal": goal, "weights": contents(weights, name)}
    learned = _fit(learner, _learning(net, course.frozen), as_denoiser, course, plan, training, about)
    kept = PARTS if isinstance(course.objective, Balance) else PARTS[:1]  # other baselines are no twists
    for part, trained in zip(kept, (learned.net, learned.baseline), strict=False):
        without = course.frozen if part == "proposal" else ()
        save(cast("Net", trained), file_of(out, name, part, goal), torch.bfloat16, without)
    if "value" not in kept:  # a twist of an older proposal would be taken for that of this one
        for kind in (".safetensors", ".json"):
            file_of(out, name, "value", goal).with_suffix(kind).unlink(missing_ok=True)
    card = _card(name, training, plan, course, learned, goal)
    cards = [file_of(out, name, part, goal).with_suffix(".json") for part in kept]
    for file in cards:
        write_json(file, card)
    say("measuring")
    card["quality"] = _measure(make(course.kl, 100), training, as_used or as_denoiser, goal, populations)
    for file in cards:
        write_json(file, card)
    training.tidy(file_of(out, name, "proposal", goal).name)
    return card


def _learning(net: nn.Module, frozen: Sequence[str]) -> nn.Module:
    """The network, all of whose parameters learn but those called `frozen`."""
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return net


def teach_twist(
    make: Callable[[float | None, int], Task],
    as_denoiser: Callable[[nn.Module], Denoiser],
    course: ProposalConfig,
    training: Training,
    goal: int | None,
    populations: Mapping[int, int],
    weights: Path,
) -> dict[str, Any]:
    """Train, store and measure a twist to go with the finished proposal in the folder `weights`; as `teach`."""
    learner, out = make(course.kl, course.num_steps), training.out
    if course.twist is None:
        raise ValueError(f"{learner.name} has no course for a twist alone: train it with the proposal, --proposal")
    find(weights, learner.name, goal, as_denoiser, training.device)  # or the error that says how to make it
    complete(training, weights, learner.name)
    for kind in (".safetensors", ".json"):
        bring(file_of(weights, learner.name, "proposal", goal).with_suffix(kind), out)
    rest = out / f"{learner.name}-denoiser.safetensors"
    net = load(file_of(out, learner.name, "proposal", goal), training.device, rest).requires_grad_(False)
    plan = _as_long(course.twist, training)
    course = replace(course, objective=Returns(twists=course.value.beside))
    about = {"goal": goal, "weights": contents(weights, learner.name, "proposal" + suffix(goal))}
    learned = _fit(learner, net, as_denoiser, course, plan, training, about)
    stored = file_of(out, learner.name, "value", goal)
    save(cast("Net", learned.baseline), stored, torch.bfloat16)
    card = _card(learner.name, training, plan, course, learned, goal) | {
        "what": f"learned twist of the task {learner.name}, for its learned proposal",
        "command": f"tokensteer train {learner.name} --twist{towards(goal)} {training.choices()}",
    }
    write_json(stored.with_suffix(".json"), card)
    say("measuring")
    card["quality"] = _measure(make(course.kl, 100), training, as_denoiser, goal, populations)
    write_json(stored.with_suffix(".json"), card)
    training.tidy(file_of(out, learner.name, "twist", goal).name)
    return card


def _fit(
    learner: Task,
    net: nn.Module,
    as_denoiser: Callable[[nn.Module], Denoiser],
    course: ProposalConfig,
    plan: ProposalPlan,
    training: Training,
    about: Mapping[str, Any],
) -> Learned:
    part = "twist" if isinstance(course.objective, Returns) else "proposal"
    torch.manual_seed(training.seed)  # pyright: ignore[reportUnknownMemberType]
    with shown(f"{learner.name} {part}") as bar:
        return fit_proposal(
            Steering(learner.model, learner.tilt),
            net,
            as_denoiser,
            plan=plan,
            generator=Generator(training.device).manual_seed(training.seed),
            baseline=ValueNet(course.value).to(training.device),
            objective=course.objective,
            checkpoint=file_of(training.checkpoints, learner.name, part, about["goal"]),
            watch=bar,
            about=about,
        )


def _card(
    name: str, training: Training, plan: ProposalPlan, course: ProposalConfig, learned: Learned, goal: int | None
) -> dict[str, Any]:
    last = learned.history[-1]
    return {
        "what": f"learned proposal of the task {name}, and its baseline: a twist, if it was learned by Balance",
        "command": f"tokensteer train {name} --proposal{towards(goal)} {training.choices()}",
        "data": "no data: paths of the task's own denoiser, judged by its reward",
        **training.made(),
        "goal": goal,
        "kl": course.kl,
        "steps of a path": course.num_steps,
        "objective": repr(course.objective),
        "rounds": last.step,
        "seconds": round(last.seconds, 1),
        "denoiser rows": learned.rows,
        "parameters": {
            part: sum(p.numel() for p in net.parameters())
            for part, net in zip(PARTS, (learned.net, learned.baseline), strict=True)
        },
        "plan": asdict(plan),
        "quality of": WEIGHTED,
        "history": [rounded(entry) for entry in thinned(learned.history)],
    }


def thinned(history: Sequence[Report], most: int = 100) -> list[Report]:
    """So many of the reports, the last among them."""
    every = max(1, math.ceil(len(history) / most))
    return list(history)[::-1][::every][::-1]


def rounded(entry: Progress | Tuning) -> dict[str, float | None]:
    """For a card, which knows no NaN."""
    return {name: round(value, 5) if math.isfinite(value) else None for name, value in asdict(entry).items()}


def _measure(
    task: Task,
    training: Training,
    as_denoiser: Callable[[nn.Module], Denoiser],
    goal: int | None,
    populations: Mapping[int, int],
) -> dict[str, Any]:
    """All methods at the same target, of what was stored. Samples count by their weights, those of prop-amot too."""
    trained = find(training.out, task.name, goal, as_denoiser, training.device)
    compared = {"smc-base": smc_base(task.model, task.tilt), "smc-grad": smc_grad(task.model, task.tilt)}
    found: dict[str, Any] = {}
    for name, method in (compared | methods(task, trained)).items():
        for particles, many in populations.items():
            began = time.perf_counter()
            generator = Generator(training.device).manual_seed(training.seed + 200)
            result = method(particles, many, generator=generator)
            marks = {key: value.numbers() for key, value in task.metrics(result).items()}
            log_z, error = result.pooled_log_z
            more = {
                "populations": many,
                "log_z": [log_z, error if math.isfinite(error) else None],
                "rows": dict(result.rows),
                "seconds": round(time.perf_counter() - began, 2),
            }
            found[f"{name} N={particles}"] = marks | more
            say(f"{name} N={particles}: {json.dumps(marks | more)}")
    return found
