"""All weights of a task of binary images by one command, with a card for each and a measure of what they are worth."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

from tokensteer.core.steering import Method, pretrained, smc_base, smc_grad
from tokensteer.nets import save
from tokensteer.nets.store import Net, build
from tokensteer.tasks.metrics import accuracy, hamming, label_histogram, nll_bound
from tokensteer.tasks.pixels import (
    CLASSES,
    MASK,
    ROLES,
    Data,
    Images,
    Recipe,
    augment,
    classifier,
    file_of,
    model,
    picture,
    task,
)
from tokensteer.tasks.task import Setup
from tokensteer.train import Fitted, Plan, classifier_loss, fit, masked_loss, shown

SHARES = (0.75, 0.1, 0.15)
"""Of the time, for denoiser, reward and judge."""


@dataclass(frozen=True)
class Options:
    """`minutes` is the time for training, all together; without it, the recipe's steps times `scale`.

    The rest says how much is measured: `samples` of the model, `populations` of each method, `images` of the test data,
    `num_steps` of the sampler.
    """

    out: Path
    device: str = "cpu"
    seed: int = 0
    minutes: float | None = None
    scale: float = 1.0
    samples: int = 1000
    populations: int = 30
    goal: int = 4
    images: int = 10_000
    num_steps: int = 100


def train(recipe: Recipe, options: Options, command: str) -> dict[str, Any]:
    """Train, store, measure. A run that was killed goes on where it was if it is given the same folder and options."""
    data = recipe.data()
    checkpoints = options.out / "checkpoints"
    cards = {role: _train_one(recipe, role, data.train, options, command, checkpoints) for role in ROLES}
    setup = Setup(options.num_steps, options.goal, options.device, options.out)
    found, samples = _measure(recipe, setup, data, options)
    for role in ROLES:
        card = cards[role] | {"quality": found[role]}
        if role == "denoiser":
            card["hamming"] = [
                round(float(hamming(data.test.ids[data.test.labels == k]).mean()), 5) for k in range(CLASSES)
            ]
        _write(file_of(recipe, role, options.out).with_suffix(".json"), card)
    sheets = [samples[:128], *_steer(recipe, setup, options, found)]
    picture(torch.cat(sheets), recipe.side, options.out / f"{recipe.name}-samples.png")
    _write(options.out / f"{recipe.name}-quality.json", found)
    shutil.rmtree(checkpoints, ignore_errors=True)
    return found


def _plan(plan: Plan, share: float, options: Options) -> Plan:
    if options.minutes is not None:
        return replace(plan, steps=10**9, seconds=60.0 * options.minutes * share)
    return replace(plan, steps=max(1, round(plan.steps * options.scale)))


def _train_one(
    recipe: Recipe, role: str, images: Images, options: Options, command: str, checkpoints: Path
) -> dict[str, Any]:
    """One network, stored in half precision: all that is measured later is measured of what is stored."""
    place = ROLES.index(role)
    plan = _plan(recipe.plans[place], SHARES[place], options)
    torch.manual_seed(options.seed + place)  # pyright: ignore[reportUnknownMemberType]
    config = (recipe.denoiser, recipe.reward, recipe.judge)[place]
    net = build(config).to(options.device)
    generator = Generator(options.device).manual_seed(options.seed + place)
    loss = (
        masked_loss(MASK) if role == "denoiser" else classifier_loss(augment(recipe.side, recipe.shift, recipe.flips))
    )
    labels = None if role == "denoiser" else images.labels
    checkpoint = checkpoints / f"{role}.safetensors"
    with shown(f"{recipe.name} {role}") as watch:
        fitted = fit(net, loss, images.ids, labels, plan=plan, generator=generator, checkpoint=checkpoint, watch=watch)
    save(cast("Net", fitted.net), file_of(recipe, role, options.out), torch.bfloat16)
    return _card(recipe, role, net, fitted, plan, options, command)


def _card(
    recipe: Recipe, role: str, net: nn.Module, fitted: Fitted, plan: Plan, options: Options, command: str
) -> dict[str, Any]:
    cuda = options.device.startswith("cuda")
    return {
        "what": f"{role} of the task {recipe.name}",
        "data": recipe.source,
        "command": command,
        "seed": options.seed,
        "steps": fitted.last.step,
        "seconds": round(fitted.last.seconds, 1),
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} thread(s)",
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in net.parameters()),
        "stored": "bfloat16, mean of the weights over training",
        "plan": asdict(plan),
    }


def _measure(recipe: Recipe, setup: Setup, data: Data, options: Options) -> tuple[dict[str, Any], Tensor]:
    """What each network is worth, and unconditional samples (P, L)."""
    _say("measuring")
    generator = Generator(setup.device).manual_seed(options.seed + 100)
    prior, ids = model(recipe, setup), data.test.ids.to(setup.device).long()
    judge = classifier(recipe, "judge", setup)
    found: dict[str, Any] = {role: {} for role in ROLES}
    for role in ("reward", "judge"):
        seen, labels = ids[: options.images], data.test.labels[: options.images]
        found[role]["test accuracy"] = asdict(accuracy(classifier(recipe, role, setup), seen, labels))
    bits = nll_bound(prior.denoiser, ids[: options.images], MASK, generator=generator)
    began = time.perf_counter()
    samples = pretrained(prior)(1, options.samples, generator=generator).samples[:, 0]
    nats = recipe.length * torch.log(torch.tensor(2.0)).item()
    found["denoiser"] = {
        "bits per pixel": asdict(bits),
        "nats per image": {"mean": bits.mean * nats, "error": bits.error * nats},
        "samples": len(samples),
        "seconds": round(time.perf_counter() - began, 2),
        "labels of samples": [round(float(p), 4) for p in label_histogram(judge, samples)],
        "labels of test data": [round(float(p), 4) for p in torch.bincount(data.test.labels) / len(ids)],
        "judge's confidence in samples": float(judge(samples[:1000]).exp().amax(-1).mean()),
        "judge's confidence in test data": float(judge(ids[:1000]).exp().amax(-1).mean()),
        "hamming of samples over test data": float(hamming(samples).mean() / hamming(ids).mean()),
    }
    for role in ROLES:
        _say(f"{role}: {json.dumps(found[role])}")
    return found, samples


def _steer(recipe: Recipe, setup: Setup, options: Options, found: dict[str, Any]) -> list[Tensor]:
    """Two methods at two sizes towards the goal, measured; a row of draws of each."""
    goal = task(recipe, setup)
    methods: Mapping[str, Method] = {
        "smc_base": smc_base(goal.model, goal.tilt),
        "smc_grad": smc_grad(goal.model, goal.tilt),
    }
    sheets: list[Tensor] = []
    table: dict[str, Any] = {"goal": options.goal, "populations": options.populations}
    for name, method in methods.items():
        for particles in (4, 16):
            generator = Generator(setup.device).manual_seed(options.seed + 200)
            began = time.perf_counter()
            result = method(particles, options.populations, generator=generator)
            seconds = round(time.perf_counter() - began, 2)
            row = {key: asdict(value) for key, value in goal.metrics(result).items()}
            table[f"{name} N={particles}"] = row | {"seconds": seconds, "rows": dict(result.rows)}
            _say(f"{name} N={particles}: {json.dumps(table[f'{name} N={particles}'])}")
            sheets.append(result.sample()[:, 0][:16])
    found["steering"] = table
    return [torch.cat([s, s.new_zeros(-len(s) % 16, s.shape[1])]) for s in sheets]


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def main(recipe: Recipe, arguments: Sequence[str] | None = None) -> None:
    """The command line of a task's training."""
    parser = argparse.ArgumentParser(
        prog=f"python -m tokensteer.tasks.{recipe.name}", description=f"Train all networks of the task {recipe.name}."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, cards, samples and figures")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="time for training, measuring not counted; default: the steps")
    parser.add_argument("--scale", type=float, default=1.0, help="this many times the recipe's steps")
    parser.add_argument("--samples", type=int, default=1000, help="unconditional samples to measure")
    parser.add_argument("--populations", type=int, default=30, help="independent runs of each method")
    parser.add_argument("--goal", type=int, default=4, help="the digit to steer towards")
    parser.add_argument("--images", type=int, default=10_000, help="images of the test data to measure with, at most")
    parser.add_argument("--num-steps", type=int, default=100, help="steps of the sampler when it is measured")
    given = parser.parse_args(arguments)
    options = Options(**vars(given))
    words = " ".join(sys.argv[1:] if arguments is None else arguments)
    torch.backends.cudnn.benchmark = options.device.startswith("cuda")  # the shapes never change
    try:
        train(recipe, options, f"python -m tokensteer.tasks.{recipe.name} {words}")
    except (FileNotFoundError, ValueError) as error:
        _say(f"{recipe.name}: {error}")
        raise SystemExit(2) from error
