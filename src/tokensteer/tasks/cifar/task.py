"""Images of 32 x 32 pixels of a class, all ten classes in turn unless the goal is one: the task `cifar`.

    tokensteer train cifar --out FOLDER --device cuda --minutes 14
    tokensteer run cifar --weights FOLDER --guidance 1.5 --steps 16 --particles 4

The target of cfg and smc-cfg is p(x | c)^a · p(x)^(1 - a), times exp(r/kl) if a reward is chosen. Methods of rewards
tilt p(x | c).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tokensteer.core.particles.result import Result
from tokensteer.tasks.cifar.data import CLASSES
from tokensteer.tasks.cifar.model import GUIDANCE, NAME, STEPS, Networks, labels_of, load_networks, model, product
from tokensteer.tasks.cifar.rewards import CLASS, KLS, tilt
from tokensteer.tasks.common.metrics import Measured, diversity, ess_share, in_parts, weighted
from tokensteer.tasks.common.settings import RANDOM
from tokensteer.tasks.common.task import Failure, Prompt, Prompted, Setup, Task

PICTURED = 200


def task(setup: Setup) -> Task:
    """Images of the class `setup.goal`, or of all classes, as many populations each."""
    if setup.prompts is not None or setup.prompt:
        raise ValueError(f"{NAME} reads no prompts but classes: leave them out, and give --goal for one class")
    labels = labels_of(setup.goal)
    setup.chosen_reward(NAME, KLS)  # raises before networks are loaded
    return of_classes(setup, load_networks(setup), labels)


def of_classes(setup: Setup, networks: Networks, labels: Sequence[int], failed: Sequence[Failure] = ()) -> Task:
    """The task for some classes. Each is a prompt of its own, so that populations of each class are counted apart."""
    order = setup.order or RANDOM
    prior = model(networks, labels, setup.num_steps(STEPS), setup.remask, order)
    reward = setup.chosen_reward(NAME, KLS)
    guidance = GUIDANCE if setup.guidance is None else setup.guidance

    def metrics(result: Result) -> Mapping[str, Measured]:
        return assess(result, networks, labels)

    def only(places: Sequence[int], more: Sequence[Failure]) -> Task:
        return of_classes(setup, networks, [labels[k] for k in places], [*failed, *more])

    def marks(ids: Tensor) -> Tensor:
        """The judge's probability of the class, of the most likely one if there are several."""
        log_p = in_parts(lambda x: networks.judge(networks.images(x)), ids, 500)
        return log_p[:, list(labels)].amax(-1).exp().double()

    named = CLASSES[labels[0]] if len(labels) == 1 else f"{len(labels)} classes"
    return Task(
        NAME,
        f"images of {networks.tokeniser.config.side} x {networks.tokeniser.config.side} pixels, of {named}",
        prior,
        tilt(networks, labels, reward, setup.kl),
        metrics,
        lambda ids, file: networks.picture(ids, file, len(labels)),
        marks,
        pictured=PICTURED,
        prompted=Prompted([Prompt(CLASSES[label], CLASSES[label]) for label in labels], failed, only),
        guided=lambda: product(prior, guidance),
        tilts_guided=setup.reward is not None,
        reward=None if reward == CLASS else reward,
        goal=setup.goal,
        guidance=guidance,
        order=order,
    )


def assess(result: Result, networks: Networks, labels: Sequence[int]) -> dict[str, Measured]:
    """Means over populations: the judge's and the reward network's accuracy of weighted samples, the log-probability
    that the latter gives the class of their population, and how draws of a class differ. Features of images are
    compared in benchmarks/cifar.py, which draws thousands."""
    ids, count = result.samples.flatten(0, 1), result.samples.shape[1]
    populations = len(result.samples)
    wanted = torch.tensor(list(labels), device=ids.device).repeat_interleave(populations // len(labels) * count)

    def classified(x: Tensor) -> Tensor:
        """The log-probabilities of both classifiers, (P, 2, K)."""
        images = networks.images(x)
        return torch.stack([networks.judge(images), networks.reward(images)], 1)

    log_p = in_parts(classified, ids, 500)
    right = (log_p.argmax(-1) == wanted.unsqueeze(-1)).double()
    own = log_p[:, 1].gather(-1, wanted.unsqueeze(-1))
    found = {
        "accuracy": weighted(result, right[:, 0]),
        "reward accuracy": weighted(result, right[:, 1]),
        "class log p": weighted(result, own.double()),
    }
    found |= diversity(networks.pixels(result.sample()[:, 0]), len(labels))
    if result.reward is not None:
        found["reward"] = weighted(result, result.reward)
    return {**found, "ess": ess_share(result)}
