"""Pictures and times of the task `emoji`.

    python -m benchmarks.emoji prompts
    python -m benchmarks.emoji gallery --weights FOLDER --device cuda
    python -m benchmarks.emoji strips --weights FOLDER --device cuda
    python -m benchmarks.emoji cost --weights FOLDER --device cuda

Tables come from `tokensteer compare emoji` (docs/emoji.md).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Generator, Tensor

import tokensteer as ts
from tokensteer.app.runs.recipes import recipe_of
from tokensteer.tasks.common.sheets import write_sheet
from tokensteer.tasks.common.task import SHIPPED, Setup, Task
from tokensteer.tasks.common.training import say
from tokensteer.tasks.emoji import data
from tokensteer.tasks.emoji.captions import hashed
from tokensteer.tasks.emoji.data import PAIR, Drawings
from tokensteer.tasks.emoji.model import Networks, load_networks
from tokensteer.tasks.emoji.sources import STYLES
from tokensteer.tasks.emoji.task import task as of_setup

HERE = Path(__file__).parent
REPORTED, CHOSEN = HERE / "emoji_prompts.txt", HERE / "emoji_choosing.txt"
"""Prompts of tables and pictures, and others for choosing settings."""
PHRASE = 2
"""The form of a caption that reads "a blue heart, flat style"."""
GROUPS = (0, 3, 4, 5, 6, 7)
"""Faces, animals and plants, food, places, activities and objects. People, flags and signs are left out: small images
of them are hard to tell apart."""
KLS = (float("inf"), 0.1, 0.05, 0.02, 0.01)
DESCRIPTION = """prompts: write the prompts of tables and of choosing, captions of drawings that no network has seen in
this style. gallery: a row for each prompt, the drawing itself if the data are there, then a draw of each method.
strips: a row for each prompt, a draw of the same seed for each kl, from no reward to a strong one. cost: seconds of a
population."""


@dataclass(frozen=True)
class Options:
    what: tyro.conf.Positional[Literal["prompts", "gallery", "strips", "cost"]]
    weights: Path = SHIPPED
    out: Path = Path("out/emoji")
    device: str = "cpu"
    methods: tuple[str, ...] = ("pretrained", "best-of-n", "svdd", "fk-difference", "smc-base", "smc-grad")
    particles: int = 8
    steps: int = 24
    rows: int = 12
    """Prompts of a picture."""
    prompts: Path = REPORTED
    seed: int = 0


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    {"prompts": write_prompts, "gallery": gallery, "strips": strips, "cost": cost}[options.what](options)


def write_prompts(options: Options) -> None:
    """Of 72 unseen pairs of different concepts, by a hash of their names: 48 for tables and 24 for choosing."""
    unseen = data.read().part(PAIR)
    named = {name_of(unseen, k): k for k in range(len(unseen.pixels))}
    groups = {name: unseen.concepts[int(unseen.concept[k])].group for name, k in named.items()}
    order = sorted((name for name in named if groups[name] in GROUPS), key=lambda name: hashed(*name, "prompt"))
    texts = unseen.captions()
    for file, some in ((REPORTED, order[:48]), (CHOSEN, order[48:72])):
        file.write_text("".join(f"{texts[named[name]][PHRASE]}\n" for name in some), "utf-8")
        say(f"{file}: {len(some)} prompts")


def name_of(drawings: Drawings, place: int) -> tuple[str, str]:
    concept, style = int(drawings.concept[place]), int(drawings.style[place])
    return drawings.concepts[concept].name, list(STYLES)[style]


def gallery(options: Options) -> None:
    prompts = _prompts(options)
    task, networks = _task(options, prompts), _networks(options)
    columns = _drawings(prompts)
    for name in options.methods:
        columns.append(networks.pixels(_drawn(task, name, options)).cpu())
        say(name)
    _write(options, "gallery", columns)


def strips(options: Options) -> None:
    prompts, networks, columns = _prompts(options), _networks(options), list[Tensor]()
    for kl in KLS:
        reward = kl != float("inf")
        task = _task(options, prompts, kl if reward else None)
        columns.append(networks.pixels(_drawn(task, "smc-base" if reward else "pretrained", options)).cpu())
        say(f"kl = {kl:g}")
    _write(options, "strips", columns)


def cost(options: Options) -> None:
    """The first of three runs may load kernels, so the shortest counts."""
    task, gpu = _task(options, _prompts(options)[:1]), options.device.startswith("cuda")
    found: dict[str, Any] = {"particles": options.particles, "steps": options.steps, "device": options.device}
    for name in options.methods:
        method = recipe_of(name).make(task, task.tilt, options.particles)
        found[name] = min(_seconds(lambda m=method: m(options.particles, 1), gpu) for _ in range(3))
        say(f"{name}, N = {options.particles}, T = {options.steps}: {found[name]:.2f} s")
    if gpu:
        replay = ts.captured(recipe_of("smc-base").make(task, task.tilt, options.particles), options.particles, 1)
        found["smc-base, captured"] = min(_seconds(replay, gpu) for _ in range(3))
        say(f"smc-base, captured: {found['smc-base, captured']:.2f} s")
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "cost.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")


def _prompts(options: Options) -> list[str]:
    return options.prompts.read_text("utf-8").splitlines()[: options.rows]


def _networks(options: Options) -> Networks:
    return load_networks(Setup(weights=options.weights, device=options.device))


def _task(options: Options, prompts: Iterable[str], kl: float | None = None) -> Task:
    setup = Setup(options.steps, kl=kl, device=options.device, weights=options.weights, prompt=tuple(prompts))
    return of_setup(setup)


def _drawn(task: Task, name: str, options: Options) -> Tensor:
    """A draw for each prompt, (B, L)."""
    assert task.prompted is not None
    recipe, generator = recipe_of(name), Generator(task.model.device).manual_seed(options.seed)
    method = recipe.make(task, task.tilt, options.particles)
    result = recipe.answer(method(options.particles, len(task.prompted.prompts), generator=generator))
    return result.sample(generator=generator)[:, 0]


def _drawings(prompts: list[str]) -> list[Tensor]:
    """The drawings that prompts are the captions of, as a column, if the data are there."""
    try:
        unseen = data.read().part(PAIR)
    except FileNotFoundError as error:
        say(f"No drawings in the gallery: {error}")
        return []
    places = {texts[PHRASE]: k for k, texts in enumerate(unseen.captions())}
    if not set(prompts) <= set(places):
        return []
    return [unseen.pixels[torch.tensor([places[prompt] for prompt in prompts])]]


def _write(options: Options, name: str, columns: list[Tensor]) -> None:
    file = options.out / f"{name}.png"
    options.out.mkdir(parents=True, exist_ok=True)
    write_sheet(file, torch.stack(columns, 1).flatten(0, 1), len(columns), 1)
    say(f"{file}: {len(columns)} columns")


def _seconds(run: Callable[[], Any], gpu: bool) -> float:
    if gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    tyro.cli(main, description=DESCRIPTION, config=(tyro.conf.FlagCreatePairsOff,))
