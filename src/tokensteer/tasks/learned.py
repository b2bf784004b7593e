"""Learned proposals and twists of the tasks: how they are trained, where they lie, how they are found again."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Generator, nn

from tokensteer.core.denoiser import Denoiser
from tokensteer.core.proposal import Amortised
from tokensteer.core.steering import Method, Steering, prop_amot, smc_amot, smc_base, smc_grad
from tokensteer.core.twist import LearnedTwist, Tilt
from tokensteer.nets import ValueConfig, ValueNet, load, save
from tokensteer.nets.store import Net
from tokensteer.tasks.task import Task, Trained
from tokensteer.tasks.training import Training, say, write_json
from tokensteer.train import Balance, Learned, Objective, Progress, ProposalPlan, fit_proposal, shown

PARTS = ("proposal", "value")


@dataclass(frozen=True)
class Course:
    """How the proposal of a task is trained: at `kl`, in `num_steps`, fewer than it is used with since no network is
    told the time. `value` is the network of the baseline, which under `Balance` is a learned twist. Parameters called
    `frozen` stay those of the denoiser and are stored with it alone."""

    plan: ProposalPlan
    objective: Objective
    value: ValueConfig
    kl: float = 1.0
    num_steps: int = 50
    frozen: tuple[str, ...] = ()


def file_of(folder: Path, task: str, part: str, goal: int | None) -> Path:
    """The weights of a part, `proposal` or `value`, for the goal it was trained for."""
    return folder / f"{task}-{part}{'' if goal is None else f'-{goal}'}.safetensors"


def find(
    folder: Path, task: str, goal: int | None, as_denoiser: Callable[[nn.Module], Denoiser], device: str
) -> Trained:
    """What was trained for this goal, with its card."""
    file, twist = (file_of(folder, task, part, goal) for part in PARTS)
    if not file.is_file():
        known = sorted(file.stem for file in folder.glob(f"{task}-proposal*.safetensors"))
        towards = "" if goal is None else f" --goal {goal}"
        raise FileNotFoundError(
            f"there is no {file.name} in the weights (there: {', '.join(known) or 'none'}): train it by "
            f"tokensteer train {task} --proposal{towards} --out FOLDER, and give --weights FOLDER"
        )
    value = load(twist, device) if twist.is_file() else None
    card = json.loads(file.with_suffix(".json").read_text())
    net = load(file, device, folder / f"{task}-denoiser.safetensors")
    return Trained(as_denoiser(net), value, card)


def with_twist(tilt: Tilt, trained: Trained) -> Tilt:
    """The same target led to by the learned twist, which is not told the time."""
    if trained.value is None:
        raise ValueError("no twist was learned with this proposal: use smc-amot, or train one with Balance(...)")
    return LearnedTwist(trained.value, ignores_time=True).on(tilt)


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
    course: Course,
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
    _complete(out, weights, name)
    plan = course.plan
    if training.minutes is not None:
        plan = replace(plan, rounds=10**9, seconds=60.0 * training.minutes)
    else:
        plan = replace(plan, rounds=max(1, round(plan.rounds * training.scale)))
    torch.manual_seed(training.seed)  # pyright: ignore[reportUnknownMemberType]
    value = ValueNet(course.value).to(training.device)
    checkpoint = out / "checkpoints" / f"{name}-proposal{'' if goal is None else f'-{goal}'}.safetensors"
    with shown(f"{name} proposal") as bar:
        learned = fit_proposal(
            Steering(learner.model, learner.tilt),
            _learning(net, course.frozen),
            as_denoiser,
            plan=plan,
            generator=Generator(training.device).manual_seed(training.seed),
            baseline=value,
            objective=course.objective,
            checkpoint=checkpoint,
            watch=bar,
        )
    kept = PARTS if isinstance(course.objective, Balance) else PARTS[:1]  # other baselines are no twists
    for part, trained in zip(kept, (learned.net, learned.baseline), strict=False):
        without = course.frozen if part == "proposal" else ()
        save(cast("Net", trained), file_of(out, name, part, goal), torch.bfloat16, without)
    card = _card(name, training, plan, course, learned, goal)
    cards = [file_of(out, name, part, goal).with_suffix(".json") for part in kept]
    write_json(cards[0], card)
    say("measuring")
    card["quality"] = _measure(make(course.kl, 100), training, as_used or as_denoiser, goal, populations)
    for file in cards:
        write_json(file, card)
    checkpoint.unlink(missing_ok=True)
    return card


def _learning(net: nn.Module, frozen: Sequence[str]) -> nn.Module:
    """The network, all of whose parameters learn but those called `frozen`."""
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return net


def _complete(out: Path, weights: Path, name: str) -> None:
    """A folder of weights is only of use with the networks that the proposal goes with."""
    out.mkdir(parents=True, exist_ok=True)
    for file in weights.glob(f"{name}-*"):
        if "-proposal" not in file.stem and "-value" not in file.stem and not (out / file.name).exists():
            shutil.copyfile(file, out / file.name)


def _card(
    name: str, training: Training, plan: ProposalPlan, course: Course, learned: Learned, goal: int | None
) -> dict[str, Any]:
    towards = "" if goal is None else f" --goal {goal}"
    last = learned.history[-1]
    return {
        "what": f"learned proposal of the task {name}, and its baseline: a twist, if it was learned by Balance",
        "command": f"tokensteer train {name} --proposal{towards} {training.choices()}",
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
        "history": [_rounded(entry) for entry in _thinned(learned.history)],
    }


def _thinned(history: Any, most: int = 100) -> list[Progress]:
    """So many of the reports, the last among them."""
    every = max(1, math.ceil(len(history) / most))
    return list(history)[::-1][::every][::-1]


def _rounded(entry: Progress) -> dict[str, float]:
    return {name: round(value, 5) for name, value in asdict(entry).items()}


def _measure(
    task: Task,
    training: Training,
    as_denoiser: Callable[[nn.Module], Denoiser],
    goal: int | None,
    populations: Mapping[int, int],
) -> dict[str, Any]:
    """All methods at the same target, of what was stored."""
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
