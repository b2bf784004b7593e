"""All weights of the task `dna` by one command, with a card for each and a measure of what they are worth."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor, nn

from tokensteer.core.models.denoiser import Denoiser
from tokensteer.core.numerics.domains import check_wholes
from tokensteer.core.steering.methods import Method, pretrained, smc_base, smc_grad
from tokensteer.files import write_json
from tokensteer.tasks.common.metrics import Measured, accuracy, hamming, in_parts, measured, nll_bound
from tokensteer.tasks.common.task import Setup, Task
from tokensteer.tasks.common.training import Training, say, train_net
from tokensteer.tasks.dna import reference as dna_reference
from tokensteer.tasks.dna.data import (
    CELLS,
    FILE,
    LETTERS,
    MASK,
    Augment,
    Data,
    Sites,
    data,
    either_strand,
    halves,
    harder,
)
from tokensteer.tasks.dna.kmers import auc, kmer_shares, markov_bits, pearson
from tokensteer.tasks.dna.model import (
    DENOISER,
    JUDGE,
    NAME,
    REWARD,
    UNIFORM,
    classifier,
    file_of,
    model,
    of_cell,
    uniform_model,
)
from tokensteer.tasks.nets import load
from tokensteer.tasks.nets.store import Config
from tokensteer.train import Loss, Plan, classifier_loss, masked_loss, uniform_bound, uniform_loss

SOURCE = (
    f"{FILE}: 47,872 accessible sites of 200 bp of HepG2, K562, GM12878 and hESCT0, chromosomes but 1 (test) and 2 "
    "(validation)"
)
UNLABELLED = 0.5
"""The share of rows that the denoiser sees without their cell type: it is the model without a label that is steered."""
SHIFT, WRONG = 4, 0.03


@dataclass(frozen=True)
class Role:
    """A network and how it is trained: `sites` chooses from the training data, `share` is of the time."""

    config: Config
    loss: Loss
    plan: Plan
    share: float
    sites: Callable[[Sites], Sites] = lambda sites: sites


def turned(loss: Loss, augment: Augment = either_strand) -> Loss:
    """The loss of sequences that were changed first."""

    def of_changed(net: nn.Module, x0: Tensor, labels: Tensor | None, generator: Generator) -> Tensor:
        return loss(net, augment(x0, generator), labels, generator)

    return of_changed


ROLES: dict[str, Role] = {
    "denoiser": Role(
        DENOISER,
        turned(masked_loss(MASK, UNLABELLED)),
        Plan(16_000, batch_size=256, rate=1.5e-3, weight_decay=0.05, average=0.9995),
        0.45,
    ),
    "uniform": Role(
        UNIFORM,
        turned(uniform_loss(len(LETTERS))),
        Plan(12_000, batch_size=256, rate=1.5e-3, weight_decay=0.05, average=0.9995),
        0.25,
    ),
    "reward": Role(
        REWARD,
        classifier_loss(harder(SHIFT, WRONG)),
        Plan(4000, batch_size=256, rate=1e-3, weight_decay=0.1),
        0.15,
        lambda sites: halves(sites)[0],
    ),
    "judge": Role(
        JUDGE,
        classifier_loss(harder(SHIFT, WRONG)),
        Plan(4000, batch_size=256, rate=7e-4, weight_decay=0.1),
        0.15,
        lambda sites: halves(sites)[1],
    ),
}
"""The judge is trained on the half of the sites that the reward is not trained on. Steps are a limit even where there
is more time: nobody gains from learning so few sites by heart."""


@dataclass(frozen=True)
class Trial:
    """How much is measured: `samples` of the model, `populations` of each method, `sites` of each part of the data."""

    samples: int = 1000
    populations: int = 30
    goal: int = 0
    sites: int = 5000
    num_steps: int = 100

    def __post_init__(self) -> None:
        check_wholes("Trial", 0, **vars(self))
        if min(self.samples, self.populations, self.sites, self.num_steps) < 2:
            raise ValueError(f"all that is measured needs at least 2 to have an error, got {self}")


def plan_of(role: Role, training: Training) -> Plan:
    """The steps of a role, or fewer if its share of the time is over before."""
    limit = None if training.minutes is None else 60.0 * training.minutes * role.share
    return replace(role.plan, steps=max(1, round(role.plan.steps * training.scale)), seconds=limit)


def train(
    training: Training,
    trial: Trial | None = None,
    roles: Mapping[str, Role] = ROLES,
    make: Callable[[Setup], Task] | None = None,
) -> dict[str, Any]:
    """Train, store, measure. A run that was killed goes on where it was if it is given the same folder and options.
    `make` is the task whose steering is measured; without it none is."""
    trial = Trial() if trial is None else trial
    sites, out = data(), training.out
    setup = Setup(trial.num_steps, trial.goal, device=training.device, weights=out)
    training.begin()
    cards = {name: _train_one(name, role, sites, training) for name, role in roles.items()}
    dna_reference.build(setup, sites).save(out)
    for name in roles:  # without quality: see `finished`
        write_json(file_of(name, out).with_suffix(".json"), cards[name])
    say("measuring")
    found = _measure(setup, sites, training, trial, roles)
    if make is not None:
        found["steering"] = _steer(make(setup), training, trial)
    write_json(out / f"{NAME}-quality.json", found)
    for name in roles:
        write_json(file_of(name, out).with_suffix(".json"), cards[name] | {"quality": found[name]})
    training.tidy(*(file_of(name, out).name for name in roles))
    return found


def _train_one(name: str, role: Role, sites: Data, training: Training) -> dict[str, Any]:
    some, place = role.sites(sites.train), list(ROLES).index(name)
    data = some.ids, None if name == "uniform" else some.labels
    card = train_net(training, NAME, name, place, role.config, role.loss, data, plan_of(role, training), SOURCE)
    return card | {"training sites": len(some.ids), "config": asdict(role.config)}


def _measure(setup: Setup, sites: Data, training: Training, trial: Trial, roles: Mapping[str, Role]) -> dict[str, Any]:
    """What each network is worth: bounds on the data it was trained on and on two chromosomes it was not."""
    device = setup.device
    generator = Generator(device).manual_seed(training.seed + 100)
    parts = {"train": sites.train, "chromosome 2": sites.validation, "chromosome 1": sites.test}
    some = {name: _some(part, trial.sites) for name, part in parts.items()}
    ids = {name: part.ids.to(device).long() for name, part in some.items()}
    prior = model(setup)
    bits = {name: nll_bound(prior.denoiser, x, MASK, generator=generator) for name, x in ids.items()}
    test, labels = ids["chromosome 1"], some["chromosome 1"].labels.to(device)
    net = load(file_of("denoiser", setup.weights), device)
    told = [
        nll_bound(of_cell(net, cell), test[labels == cell], MASK, generator=generator) for cell in range(len(CELLS))
    ]
    began = time.perf_counter()
    samples = pretrained(prior)(1, trial.samples, generator=generator).samples[:, 0]
    seconds = time.perf_counter() - began
    judge = classifier("judge", setup)
    found: dict[str, Any] = {
        "denoiser": {
            "bits per base": {name: value.numbers() for name, value in bits.items()},
            "bits per base of chromosome 1, cell type told": {
                cell: value.numbers() for cell, value in zip(CELLS, told, strict=True)
            },
            "bits per base of chromosome 1, Markov chain": {
                f"order {order}": markov_bits(sites.train.ids, test.cpu(), order).numbers() for order in (0, 2, 5)
            },
            "samples": len(samples),
            "seconds of sampling": round(seconds, 2),
            "3-mer correlation of samples with chromosome 1": float(
                pearson(kmer_shares(samples, 3), kmer_shares(test, 3))
            ),
            "hamming of samples over chromosome 1": float(hamming(samples).mean() / hamming(test).mean()),
            "cell types of samples by the judge": _shares(in_parts(judge, samples).exp().mean(0)),
            "cell types of chromosome 1 by the judge": _shares(in_parts(judge, test).exp().mean(0)),
        },
        "uniform": {
            "bits per base": {
                name: uniform_bits(uniform_model(setup).denoiser, x, generator).numbers() for name, x in ids.items()
            }
        },
    }
    for role in ("reward", "judge"):
        found[role] = {name: _classifies(classifier(role, setup), ids[name], some[name].labels) for name in parts}
    for role in roles:
        say(f"{role}: {json.dumps(found[role])}")
    return found


def _some(sites: Sites, count: int) -> Sites:
    """So many sites at most, at random: the file is in the order of cell types."""
    return sites.take(torch.randperm(len(sites.ids), generator=Generator().manual_seed(0))[:count])


def _shares(values: Tensor) -> dict[str, float]:
    return {cell: round(float(value), 4) for cell, value in zip(CELLS, values, strict=True)}


def _classifies(net: Callable[[Tensor], Tensor], ids: Tensor, labels: Tensor) -> dict[str, Any]:
    """The AUC of each cell type against the rest, the share of right answers, and the cross-entropy in nats."""
    log_p = in_parts(net, ids).cpu()
    right = -log_p.gather(1, labels.unsqueeze(1)).squeeze(1)
    return {
        "AUC": {cell: auc(log_p[:, k], labels == k).numbers() for k, cell in enumerate(CELLS)},
        "accuracy": accuracy(net, ids, labels).numbers(),
        "nats": measured(right).numbers(),
        "sites": len(ids),
    }


def uniform_bits(denoiser: Denoiser, ids: Tensor, generator: Generator, draws: int = 8, rows: int = 500) -> Measured:
    """The bound on -log2 p(x) per letter of a model of uniform noise; each sequence is seen `draws` times."""

    def bound(x0: Tensor) -> Tensor:
        many = x0.long().repeat_interleave(draws, 0)
        jitter = torch.rand(len(x0), draws, generator=generator, device=x0.device)
        u = ((torch.arange(draws, device=x0.device) + jitter) / draws).flatten()
        return uniform_bound(denoiser, many, len(LETTERS), generator, u).view(-1, draws).mean(-1)

    return measured(in_parts(bound, ids, rows) / (math.log(2) * ids.shape[1]))


def _steer(goal: Task, training: Training, trial: Trial) -> dict[str, Any]:
    """A few methods at two sizes towards the goal, measured."""
    methods: Mapping[str, Method] = {
        "pretrained": pretrained(goal.model),
        "smc_base": smc_base(goal.model, goal.tilt),
        "smc_grad": smc_grad(goal.model, goal.tilt),
    }
    table: dict[str, Any] = {"goal": trial.goal, "populations": trial.populations, "steps": trial.num_steps}
    for name, method in methods.items():
        for particles in (4, 16):
            generator = Generator(training.device).manual_seed(training.seed + 200)
            began = time.perf_counter()
            result = method(particles, trial.populations, generator=generator)
            seconds = round(time.perf_counter() - began, 2)
            marks = {key: value.numbers() for key, value in goal.metrics(result).items()}
            table[f"{name} N={particles}"] = marks | {"seconds": seconds, "rows": dict(result.rows)}
            say(f"{name} N={particles}: {json.dumps(table[f'{name} N={particles}'])}")
    return table
