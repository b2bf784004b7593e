"""Settings, pictures and times of the task `emoji`.

    python -m benchmarks.emoji prompts
    python -m benchmarks.emoji choose --weights FOLDER --device cuda
    python -m benchmarks.emoji drawings --weights FOLDER
    python -m benchmarks.emoji agreement --weights FOLDER --run FOLDER
    python -m benchmarks.emoji gallery --weights FOLDER --device cuda
    python -m benchmarks.emoji strips --weights FOLDER --device cuda
    python -m benchmarks.emoji cost --weights FOLDER --device cuda --particles 1 2 4 8 16

Tables come from `tokensteer compare emoji` (docs/emoji.md), figures of them from benchmarks.figures, and differences
prompt by prompt from benchmarks.paired.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Generator, Tensor

from benchmarks import figures
from benchmarks.run_folders import read_all
from benchmarks.seconds import ALONE, Cell, measure
from tokensteer.app.runs.choices import tilted
from tokensteer.app.runs.recipes import recipe_of
from tokensteer.core.particles.result import Result
from tokensteer.core.steering.methods import Method
from tokensteer.tasks.common.metrics import measured
from tokensteer.tasks.common.prompts import numbered, read
from tokensteer.tasks.common.settings import MOST, Settings, check_count
from tokensteer.tasks.common.sheets import write_sheet
from tokensteer.tasks.common.task import SHIPPED, Setup, Task
from tokensteer.tasks.common.tokenised_images import reconstructed
from tokensteer.tasks.common.training import say
from tokensteer.tasks.emoji import data
from tokensteer.tasks.emoji.captions import hashed
from tokensteer.tasks.emoji.data import PAIR, Drawings
from tokensteer.tasks.emoji.model import Networks, load_networks
from tokensteer.tasks.emoji.rewards import agreement
from tokensteer.tasks.emoji.sources import STYLES
from tokensteer.tasks.emoji.task import SECOND_JUDGE, of_prompts, scores
from tokensteer.tasks.emoji.teachers import find_judge
from tokensteer.tasks.nets.text_encoder import sentence_vectors
from tokensteer.tasks.quality.features import INCEPTION

HERE = Path(__file__).parent
REPORTED, CHOSEN = HERE / "emoji_prompts.txt", HERE / "emoji_choosing.txt"
"""Prompts of tables and pictures, and others for choosing settings."""
PHRASE = 2
"""The form of a caption that reads "a blue heart, flat style"."""
GROUPS = (0, 3, 4, 5, 6, 7)
"""Faces, animals and plants, food, places, activities and objects. People, flags and signs are left out: small images
of them are hard to tell apart."""
KLS = (float("inf"), 0.1, 0.05, 0.02, 0.01)
COUNTS = (1, 2, 4, 8, 16)
DESCRIPTION = """\
prompts: write the prompts of tables and of choosing, captions of drawings that no network has seen in this style.
choose: the judge's agreement for each guidance, kl and number of draws, on the prompts kept for choosing, best last,
and how reward and judge agree among samples of the model of one prompt. drawings: what reward and judge give the
drawings that prompts are the captions of, which shows how far a score can be trusted. agreement: how reward and judges
agree among samples of the model of one prompt, and what the judges give the sample of the highest reward. gallery: a
row for each prompt, the drawing itself if the data are there, then a draw of each method. strips: a row for each
prompt, a draw of the same seed for each kl, from no reward to a strong one. cost: seconds of an image for each method
and N, a line for each in cost.jsonl and a figure of them all."""


@dataclass(frozen=True)
class Options:
    what: tyro.conf.Positional[Literal["prompts", "choose", "drawings", "agreement", "gallery", "strips", "cost"]]
    weights: Path = SHIPPED
    out: Path = Path("out/emoji")
    device: str = "cpu"
    methods: tuple[str, ...] = ("pretrained", "best-of-n", "svdd", "fk-difference", "smc-base", "smc-grad")
    particles: tuple[int, ...] = ()
    """Eight unless given, and 1 2 4 8 16 for cost, which alone takes several. The model alone is timed with one."""
    steps: int = 24
    images: tuple[int, ...] = (1,)
    """For cost: how many images are made at once, of as many prompts. Seconds are those of one of them."""
    rows: int = 12
    """Prompts of a picture."""
    prompts: Path = REPORTED
    run: Path | None = None
    """For agreement, and for gallery instead of new samples: the folder of `tokensteer compare emoji --populations 1
    --prompts FILE`, whose samples are read."""
    seed: int = 0
    populations: int = 4
    """Of each prompt, when settings are chosen."""
    guidances: tuple[float, ...] = (1.0, 1.5, 2.0, 3.0)
    kls: tuple[float, ...] = (0.05, 0.02, 0.01, 0.005)
    draws: tuple[int, ...] = (1,)
    by: str = "judge"
    """The metric that settings are chosen by: judge, or Inception judge where Inception's file lies in the data
    folder."""

    @property
    def size(self) -> int:
        """The number of particles where one is wanted."""
        if len(self.particles) > 1:
            given = " ".join(map(str, self.particles))
            raise ValueError(f"{self.what} has one number of particles, got --particles {given}: give one")
        return self.particles[0] if self.particles else 8


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    check_count("rows", options.rows, MOST, 12)
    check_count("particles", min(options.particles, default=1), MOST, 8)
    check_count("images", min(options.images, default=0), MOST, 1)
    {
        "prompts": write_prompts,
        "choose": choose_settings,
        "drawings": score_drawings,
        "agreement": compare_scores,
        "gallery": gallery,
        "strips": strips,
        "cost": cost,
    }[options.what](options)


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


def choose_settings(options: Options) -> None:
    """The mean of SMC_base and SMC_grad decides. Lines are written as they are found."""
    _check_metric(options)
    texts, networks = [prompt.text for prompt in read(CHOSEN)], _networks(options)
    cells: list[dict[str, Any]] = []
    for guidance in options.guidances:
        for kl, draws in product(options.kls, options.draws):
            task = _task(options, networks, texts, kl, guidance)
            if not cells or cells[-1]["guidance"] != guidance:
                say(f"guidance {guidance:g}: {_of_model(task, networks, texts, options)}")
            judged = {
                name: task.metrics(_answered(task, name, options, options.populations, draws))[options.by]
                for name in ("best-of-n", "smc-base", "smc-grad")
            }
            cell: dict[str, Any] = {"guidance": guidance, "kl": kl, "draws": draws}
            cell["methods"] = {name: judge.numbers() for name, judge in judged.items()}
            cell[options.by] = (judged["smc-base"].mean + judged["smc-grad"].mean) / 2
            cells.append(cell)
            options.out.mkdir(parents=True, exist_ok=True)
            with (options.out / "choose.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(cell) + "\n")
            say(_line(cell))
    say(f"best: {_line(max(cells, key=lambda cell: cell[options.by]))}")


def _check_metric(options: Options) -> None:
    known = ("judge", "alignment", SECOND_JUDGE)
    if options.by not in known:
        raise ValueError(f"--by must be one of {', '.join(known)}, got {options.by}")
    if options.by == SECOND_JUDGE and find_judge(options.weights, options.device) is None:
        raise FileNotFoundError(
            f"there is no {INCEPTION[0]} in the data folder, or no map of the judge's teacher in {options.weights}: "
            f"set TOKENSTEER_DATA to the folder that holds the file of {INCEPTION[1]}, or give --by judge"
        )


def _line(cell: dict[str, Any]) -> str:
    judged = (f"{name} {found['mean']:.3f} ± {found['error']:.3f}" for name, found in cell["methods"].items())
    return f"guidance {cell['guidance']:g}, kl {cell['kl']:g}, {cell['draws']} draws: {', '.join(judged)}"


def _of_model(task: Task, networks: Networks, texts: Sequence[str], options: Options) -> str:
    """The judge's agreement of samples of the model, and its correlation with the reward's within a prompt."""
    result = _answered(task, "pretrained", options, options.populations)
    ids = result.samples.flatten(0, 1)
    vectors = sentence_vectors(networks.states(texts)).repeat_interleave(len(ids) // len(texts), 0)
    found = scores(networks, ids, vectors).view(len(texts), -1, 2)
    within = (found - found.mean(1, keepdim=True)).flatten(0, 1)
    alike = torch.corrcoef(within.T)[0, 1]
    return f"{options.by} {task.metrics(result)[options.by]}, correlation within a prompt {alike:.3f}"


def score_drawings(options: Options) -> None:
    """The agreement of the drawings of all prompts with their captions, and that of their reconstructions."""
    texts, networks = [prompt.text for prompt in read(options.prompts)], _networks(options)
    pixels = [part.to(networks.device) for part in _of_prompts(data.read(), texts)]
    if not pixels:
        raise ValueError(f"not all of {options.prompts} are captions of unseen pairs: give --prompts of drawings")
    vectors, second = sentence_vectors(networks.states(texts)), find_judge(options.weights, networks.device)
    for part in pixels:
        for name, images in (("drawings", part), ("reconstructions", reconstructed(networks.tokeniser, part))):
            found = {
                tower: measured(agreement(net, images.float() / 255, vectors).double())
                for tower, net in (("judge", networks.judge), ("alignment", networks.reward))
            }
            if second is not None:
                found[SECOND_JUDGE] = measured(second(images, vectors).double())
            say(f"{len(texts)} {name}: " + ", ".join(f"{tower} {value}" for tower, value in found.items()))


@torch.no_grad()
def compare_scores(options: Options) -> None:
    """Samples are those of the model in a run folder, all seeds. An error is that over prompts."""
    if options.run is None:
        raise ValueError("agreement reads samples: give --run FOLDER, of tokensteer compare emoji --methods pretrained")
    texts, networks = [prompt.text for prompt in read(options.prompts)], _networks(options)
    samples = [_rows(ALONE, replace(options, seed=seed)).samples for seed in _seeds(options)]
    ids = torch.cat(samples, 1).to(networks.device)  # (B, all particles, L)
    each = ids.shape[1]
    vectors = sentence_vectors(networks.states(texts)).repeat_interleave(each, 0)
    table = scores(networks, ids.flatten(0, 1), vectors).T
    found = {"judge": table[0], "reward": table[1]}
    if (second := find_judge(options.weights, networks.device)) is not None:
        found[SECOND_JUDGE] = second(networks.pixels(ids.flatten(0, 1)), vectors).double()
    within = {name: values.view(len(texts), each) for name, values in found.items()}
    within = {name: values - values.mean(1, keepdim=True) for name, values in within.items()}
    groups = within["reward"].view(-1, options.size)
    best = groups.argmax(1, keepdim=True)
    for name, values in within.items():
        alike = torch.corrcoef(torch.stack([values.flatten(), within["reward"].flatten()]))[0, 1]
        gain = measured(values.view(-1, options.size).gather(1, best).view(len(texts), -1).mean(1))
        say(f"{name}: correlation with the reward {alike:.2f}, best of {options.size} by reward {gain}")


def name_of(drawings: Drawings, place: int) -> tuple[str, str]:
    concept, style = int(drawings.concept[place]), int(drawings.style[place])
    return drawings.concepts[concept].name, list(STYLES)[style]


def gallery(options: Options) -> None:
    prompts, networks = _prompts(options), _networks(options)
    task, columns = _task(options, networks, prompts), _drawings(prompts)
    for name in options.methods:
        ids = _drawn(task, name, options) if options.run is None else _stored(name, options)[: len(prompts)]
        columns.append(networks.pixels(ids).cpu())
        say(name)
    _write(options, "gallery", columns)


def _stored(name: str, options: Options) -> Tensor:
    """A draw for each prompt of a run folder, (B, L)."""
    return _rows(name, options).sample(generator=Generator().manual_seed(options.seed))[:, 0]


def _seeds(options: Options) -> list[int]:
    assert options.run is not None
    return sorted({one.row.seed for one in read_all([options.run])})


def _rows(name: str, options: Options) -> Result:
    """What a method made in a run folder, a population for each prompt."""
    assert options.run is not None
    found = [one.row for one in read_all([options.run])]
    here = [row for row in found if (row.family, row.particles, row.seed) == (name, options.size, options.seed)]
    count = len(read(options.prompts))
    if not here or len(here[0].answer.samples) != count:
        raise ValueError(
            f"{options.run} has no {name} with N = {options.size}, seed {options.seed} and a population for each of "
            f"the {count} prompts of {options.prompts}: give --methods, --particles, --seed and --prompts of the run"
        )
    return here[0].answer


def strips(options: Options) -> None:
    prompts, networks, columns = _prompts(options), _networks(options), list[Tensor]()
    for kl in KLS:
        reward = kl != float("inf")
        task = _task(options, networks, prompts, kl if reward else None)
        columns.append(networks.pixels(_drawn(task, "smc-base" if reward else "pretrained", options)).cpu())
        say(f"kl = {kl:g}")
    _write(options, "strips", columns)


def cost(options: Options) -> None:
    """Cells of few particles come first, so that a run that is stopped has them for all methods; graphs come last."""
    texts, networks = [prompt.text for prompt in read(options.prompts)], _networks(options)
    if max(options.images) > len(texts):
        raise ValueError(f"{options.prompts} has {len(texts)} prompts, too few for --images {max(options.images)}")
    tasks = {count: _task(options, networks, texts[:count]) for count in options.images}
    device, counts = torch.device(options.device), options.particles or COUNTS
    steered = [name for name in options.methods if name != ALONE]
    cells = [Cell(ALONE, 1, options.steps, images) for images in tasks if ALONE in options.methods]
    cells += [Cell(name, n, options.steps, images) for images, n, name in product(tasks, counts, steered)]
    if device.type == "cuda":
        cells += [replace(cell, captured=True) for cell in cells if cell.method == "smc-base"]

    def make(cell: Cell) -> Method:
        return method_of(tasks[cell.images], cell.method, cell.particles, options.seed)

    file = options.out / "cost.jsonl"
    measure(cells, make, device, file)
    try:
        figures.seconds(file, options.out / "seconds.png")
    except ImportError as error:
        say(f"{error}; then python -m benchmarks.figures seconds {file}")


def _prompts(options: Options) -> list[str]:
    return [prompt.text for prompt in read(options.prompts)][: options.rows]


def _networks(options: Options) -> Networks:
    return load_networks(Setup(weights=options.weights, device=options.device))


def _task(
    options: Options, networks: Networks, texts: Sequence[str], kl: float | None = None, guidance: float | None = None
) -> Task:
    setup = Setup(options.steps, kl=kl, device=options.device, weights=options.weights, guidance=guidance)
    return of_prompts(setup, networks, numbered(texts))


def method_of(task: Task, name: str, particles: int, seed: int, draws: int | None = None) -> Method:
    """A method as the command line has it: noise that is shared has the seed of the run."""
    recipe = recipe_of(name)
    if recipe.planned or recipe.sweeps or recipe.split is not None:
        raise ValueError(f"{name} is more than a run of SMC, as is timed and drawn here: leave it out of --methods")
    return recipe.make(task, tilted(task, Settings(draws=draws), seed, recipe.shares), particles)


def _answered(task: Task, name: str, options: Options, each: int, draws: int | None = None) -> Result:
    """What a method makes, with so many populations for each prompt."""
    assert task.prompted is not None
    method = method_of(task, name, options.size, options.seed, draws)
    generator = Generator(task.model.device).manual_seed(options.seed)
    return recipe_of(name).answer(method(options.size, each * len(task.prompted.prompts), generator=generator))


def _drawn(task: Task, name: str, options: Options) -> Tensor:
    """A draw for each prompt, (B, L)."""
    generator = Generator(task.model.device).manual_seed(options.seed)
    return _answered(task, name, options, 1).sample(generator=generator)[:, 0]


def _drawings(prompts: list[str]) -> list[Tensor]:
    """The drawings that prompts are the captions of, as a column, if the data are there."""
    try:
        return _of_prompts(data.read(), prompts)
    except FileNotFoundError as error:
        say(f"No drawings in the gallery: {error}")
        return []


def _of_prompts(drawings: Drawings, prompts: list[str]) -> list[Tensor]:
    """Those of unseen pairs that all prompts are the captions of, or none."""
    unseen = drawings.part(PAIR)
    places = {texts[PHRASE]: k for k, texts in enumerate(unseen.captions())}
    if not set(prompts) <= set(places):
        return []
    return [unseen.pixels[torch.tensor([places[prompt] for prompt in prompts])]]


def _write(options: Options, name: str, columns: list[Tensor]) -> None:
    file = options.out / f"{name}.png"
    options.out.mkdir(parents=True, exist_ok=True)
    write_sheet(file, torch.stack(columns, 1).flatten(0, 1), len(columns), 1)
    say(f"{file}: {len(columns)} columns")


if __name__ == "__main__":
    tyro.cli(main, description=DESCRIPTION, config=(tyro.conf.FlagCreatePairsOff,))
