"""Training of the task `dna`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor, nn

from tokensteer.core.models.denoiser import Denoiser
from tokensteer.core.steering.methods import Method, pretrained, smc_base, smc_grad
from tokensteer.tasks.common.arrays import Examples
from tokensteer.tasks.common.metrics import Measured, hamming, in_parts, measured, nll_bound, stratified_bounds
from tokensteer.tasks.common.task import Setup, Task
from tokensteer.tasks.common.training import Network, Training, Trial, measure_methods, train_networks
from tokensteer.tasks.dna import reference as dna_reference
from tokensteer.tasks.dna.data import CELLS, FILE, LETTERS, MASK, Augment, Data, data, either_strand, halves, harder
from tokensteer.tasks.dna.kmers import auc, kmer_shares, markov_bits, pearson
from tokensteer.tasks.dna.model import DENOISER, JUDGE, NAME, REWARD, UNIFORM, model, of_cell, uniform_model
from tokensteer.tasks.nets.store import Config
from tokensteer.train import Loss, Plan, classifier_loss, masked_loss, uniform_bound, uniform_loss

SOURCE = (
    f"{FILE}: 47,872 accessible sites of 200 bp of HepG2, K562, GM12878 and hESCT0, chromosomes but 1 (test) and 2 "
    "(validation)"
)
UNLABELLED = 0.5
"""The share of training rows without their cell type: the model without a label is the one that is steered."""
SHIFT, WRONG = 4, 0.03
TRIAL = Trial(examples=5000)
GOAL = 0


@dataclass(frozen=True)
class Role:
    """A network, its loss and plan, its `share` of the time, and the `sites` it is trained on."""

    config: Config
    loss: Loss
    plan: Plan
    share: float
    sites: Callable[[Examples], Examples] = lambda sites: sites


def augmented(loss: Loss, augment: Augment = either_strand) -> Loss:
    """The loss of augmented sequences."""

    def of_changed(net: nn.Module, x0: Tensor, labels: Tensor | None, generator: Generator) -> Tensor:
        return loss(net, augment(x0, generator), labels, generator)

    return of_changed


_DENOISING = Plan(16_000, batch_size=256, rate=1.5e-3, weight_decay=0.05, average=0.9995)
_CLASSIFYING = Plan(4000, batch_size=256, rate=1e-3, weight_decay=0.1)
_CLASSIFY = classifier_loss(harder(SHIFT, WRONG))
ROLES: dict[str, Role] = {
    "denoiser": Role(DENOISER, augmented(masked_loss(MASK, UNLABELLED)), _DENOISING, 0.45),
    "uniform": Role(UNIFORM, augmented(uniform_loss(len(LETTERS))), replace(_DENOISING, steps=12_000), 0.25),
    "reward": Role(REWARD, _CLASSIFY, _CLASSIFYING, 0.15, lambda sites: halves(sites)[0]),
    "judge": Role(JUDGE, _CLASSIFY, replace(_CLASSIFYING, rate=7e-4), 0.15, lambda sites: halves(sites)[1]),
}
"""Reward and judge are trained on different halves of the sites. Steps are a limit even if there is more time: with
more steps the networks overfit so few sites."""


def train(
    training: Training,
    trial: Trial = TRIAL,
    roles: Mapping[str, Role] = ROLES,
    make: Callable[[Setup], Task] | None = None,
) -> dict[str, Any]:
    """Train, store and measure all networks; also methods on the task that `make` makes, if it is given."""
    sites, setup = data(), Setup(trial.num_steps, GOAL, device=training.device, weights=training.out)
    networks = {name: _network(name, role, sites, training) for name, role in roles.items()}

    def measure() -> dict[str, Any]:
        dna_reference.build(setup, sites).save(training.out)
        found = _measure(setup, sites, training, trial)
        if make is not None:
            found["steering"] = _steer(make(setup), training, trial)
        return found

    return train_networks(training, NAME, SOURCE, networks, measure)


def _network(name: str, role: Role, sites: Data, training: Training) -> Network:
    some, plan = role.sites(sites.train), training.plan(role.plan, role.share, capped=True)
    labels = None if name == "uniform" else some.labels
    card = {"training sites": len(some.ids), "config": asdict(role.config)}
    return Network(role.config, role.loss, plan, some.ids, labels, card)


def _measure(setup: Setup, sites: Data, training: Training, trial: Trial) -> dict[str, Any]:
    """The quality of each network, on training data and on the two other chromosomes."""
    device, generator = setup.device, training.generator(100)
    parts = {"train": sites.train, "chromosome 2": sites.validation, "chromosome 1": sites.test}
    some = {name: _some(part, trial.examples) for name, part in parts.items()}
    ids = {name: part.ids.to(device).long() for name, part in some.items()}
    prior = model(setup)
    bits = {name: nll_bound(prior.denoiser, x, MASK, generator=generator) for name, x in ids.items()}
    test, labels = ids["chromosome 1"], some["chromosome 1"].labels.to(device)
    net = setup.load(NAME, "denoiser")
    labelled = {
        name: nll_bound(of_cell(net, cell), test[labels == cell], MASK, generator=generator).numbers()
        for cell, name in enumerate(CELLS)
    }
    began = time.perf_counter()
    samples = pretrained(prior)(1, trial.samples, generator=generator).samples[:, 0]
    seconds = time.perf_counter() - began
    judge = setup.load(NAME, "judge")
    found: dict[str, Any] = {
        "denoiser": {
            "bits per base": {name: value.numbers() for name, value in bits.items()},
            "bits per base of chromosome 1, cell type told": labelled,
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
        found[role] = {name: _classifies(setup.load(NAME, role), ids[name], some[name].labels) for name in parts}
    return found


def _some(sites: Examples, count: int) -> Examples:
    """At most `count` sites, at random because the file is sorted by cell type."""
    return sites.take(torch.randperm(len(sites.ids), generator=Generator().manual_seed(0))[:count])


def _shares(values: Tensor) -> dict[str, float]:
    return {cell: round(float(value), 4) for cell, value in zip(CELLS, values, strict=True)}


def _classifies(net: Callable[[Tensor], Tensor], ids: Tensor, labels: Tensor) -> dict[str, Any]:
    """The AUC of each cell type against the rest, the accuracy, and the cross-entropy in nats."""
    log_p = in_parts(net, ids).cpu()
    right = -log_p.gather(1, labels.unsqueeze(1)).squeeze(1)
    return {
        "AUC": {cell: auc(log_p[:, k], labels == k).numbers() for k, cell in enumerate(CELLS)},
        "accuracy": measured((log_p.argmax(-1) == labels).double()).numbers(),
        "nats": measured(right).numbers(),
        "sites": len(ids),
    }


def uniform_bits(denoiser: Denoiser, ids: Tensor, generator: Generator) -> Measured:
    """The bound on -log2 p(x) per letter of a model of uniform noise."""

    def bound(x0: Tensor, u: Tensor) -> Tensor:
        return uniform_bound(denoiser, x0, len(LETTERS), generator, u)

    nats = stratified_bounds(bound, ids, draws=8, generator=generator, rows=500)
    return measured(nats / (math.log(2) * ids.shape[1]))


def _steer(task: Task, training: Training, trial: Trial) -> dict[str, Any]:
    """Three methods at two sizes."""
    methods: Mapping[str, Method] = {
        "pretrained": pretrained(task.model),
        "smc_base": smc_base(task.model, task.tilt),
        "smc_grad": smc_grad(task.model, task.tilt),
    }
    sizes: dict[int, int] = {4: trial.populations, 16: trial.populations}
    table = {name: found for name, _, found in measure_methods(task, methods, sizes, training)}
    return {"goal": GOAL, "populations": trial.populations, "steps": trial.num_steps, **table}
