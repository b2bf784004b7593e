"""`tokensteer train`: the networks of a task, a proposal or a twist."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from tokensteer.app.options import Outcome, Train
from tokensteer.app.runs.claims import claimed
from tokensteer.app.terminal.tables import say
from tokensteer.app.words.lookup import choose
from tokensteer.tasks.catalogue import TASKS, Entry
from tokensteer.tasks.common.learned import named
from tokensteer.tasks.common.objectives import BASELINES, OBJECTIVES, TWISTS
from tokensteer.tasks.common.proposals import ProposalConfig
from tokensteer.tasks.common.task import SHIPPED
from tokensteer.tasks.common.training import Training, finished


def main(command: Train, words: str) -> Outcome:
    task = choose(command.task, TASKS, "task")
    if task.train is None:
        raise ValueError(f"{command.task} has no networks, and nothing to train: run it as it is")
    if command.proposal and command.twist:
        raise ValueError("--proposal and --twist are trained one after the other: give one of them")
    if (command.proposal or command.twist) and task.proposal is None:
        raise ValueError(f"{command.task} has no proposal or twist to train: leave out --proposal and --twist")
    if not command.proposal and not command.twist:
        if command.goal is not None:
            raise ValueError("--goal is what a proposal or a twist is trained for: give --proposal or --twist too")
        if command.weights is not None:
            raise ValueError("--weights has the networks for training a proposal or a twist: give --proposal too")
        if command.reward is not None:
            raise ValueError("--reward is what a proposal or a twist is trained for: give --proposal or --twist too")
        if command.kl is not None:
            raise ValueError("--kl is that of the reward of a proposal or a twist: give --proposal or --twist too")
    if command.reward is not None and not task.rewards:
        raise ValueError(f"{command.task} has only one reward to train for: leave out --reward {command.reward}")
    if command.reward is not None:
        choose(command.reward, task.rewards, "reward")
    _check_objective(command, task)
    out = command.out or Path("out") / f"{command.task}-weights"
    for name, value in (("minutes", command.minutes), ("scale", command.scale), ("kl", command.kl)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name} must be positive and finite, got {value}")
    training = Training(out, command.device, command.seed, command.minutes, command.scale)
    first = next(iter(task.rewards), None)
    with claimed(out):
        if finished(_cards(command, out, first)) and not command.force:
            raise ValueError(f"{out} holds finished weights of {command.task}: give --out another folder, or --force")
        if task.proposal is not None and (command.proposal or command.twist):
            taught = task.proposal(command.goal, command.weights or SHIPPED)
            taught = replace(taught, config=_chosen(command, taught.config))
            if command.reward is not None:
                taught = taught.rewarded(command.reward, task.rewards[command.reward], command.reward == first)
            if command.kl is not None:
                taught = taught.at(command.kl)
            taught.train(training, command.twist)
        else:
            task.train(training)
    say(f"Weights: {out}   (tokensteer run {command.task} --weights {out} uses them)")
    return {"weights": str(out)}


def _check_objective(command: Train, task: Entry) -> None:
    if command.objective is not None and not (command.proposal or command.twist):
        raise ValueError("--objective is how a proposal or a twist is trained: give --proposal or --twist too")
    if command.baseline is not None and not command.proposal:
        raise ValueError("--baseline is how a proposal is trained: give --proposal too, and no --twist")
    if command.objective is not None:
        choose(command.objective, {**OBJECTIVES, **TWISTS}, "objective")
    if command.baseline is not None:
        choose(command.baseline, BASELINES, "baseline")
    given = command.objective is not None or command.baseline is not None
    if given and task.proposal is not None:  # raises before a folder is made
        _chosen(command, task.proposal(command.goal, command.weights or SHIPPED).config)


def _chosen(command: Train, config: ProposalConfig) -> ProposalConfig:
    if command.twist:
        return config.chosen_twist(command.objective)
    return config.chosen(command.objective, command.baseline)


def _cards(command: Train, out: Path, own: str | None) -> list[Path]:
    """The cards in a folder that a training of this kind writes; `own` is the reward that the task has anyway."""
    if command.proposal or command.twist:
        part = named("proposal" if command.proposal else "value", None if command.reward == own else command.reward)
        return sorted(out.glob(f"{command.task}-{part}*.json"))
    taught = ("-proposal", "-value", "-drakes", "-quality")
    cards = sorted(out.glob(f"{command.task}-*.json"))
    return [card for card in cards if not any(part in card.stem for part in taught)]
