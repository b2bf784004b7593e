"""Class-conditional images: guidance with and without weights, at the settings of the paper (docs/cifar.md).

python -m benchmarks.cifar floor --weights FOLDER --out FOLDER --device cuda
python -m benchmarks.cifar grid --weights FOLDER --out FOLDER --device cuda --minutes 9
python -m benchmarks.cifar --help
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import tyro
from tyro.conf import OmitArgPrefixes, Positional

from benchmarks import cifar_tiny
from benchmarks.cifar_cells import (
    CONFIDENT,
    CONVENTIONS,
    CORRECTED,
    MDM,
    REMDM,
    Cell,
    Drawn,
    add,
    device_name,
    drawn_images,
    finished,
    key_of,
    table,
    weights_of,
)
from benchmarks.cifar_quality import Batch, Instruments, reference_of
from benchmarks.cifar_sampling import cost, write_gallery
from tokensteer.tasks.cifar import rewards
from tokensteer.tasks.cifar.data import Data, Images, data
from tokensteer.tasks.cifar.model import REMASK, TEMPERATURE, Networks, load_networks
from tokensteer.tasks.common.task import SHIPPED, Setup
from tokensteer.tasks.common.tokenised_images import reconstructed
from tokensteer.tasks.quality.features import INCEPTION_SHA256, load_inception
from tokensteer.tasks.quality.imagenet import load_efficientnet

Part = Literal["main", "kernels", "conventions", "temperatures", "rows"]
DESCRIPTION = """\
floor: FID and KID of the test images and of the tokeniser's reconstructions against the training images. grid:
guidances x steps x particles with remasking, then the samplers at one particle, then the conventions of products.
controls: temperatures at one particle, and N particles x T steps against one particle with as many rows. tilt: rewards
beside the product, with and without gradients. gallery: sheets of samples, those of one particle beside those of many.
cost: seconds for 1,000 images, and a steered step in forward passes, without and with remasking. table: what the files
of a folder hold. Cells are written as they finish, and those that are there are skipped. gallery and cost need the
networks alone, the others Inception too, and CIFAR-10 unless --reference has its moments; floor always needs it."""


@dataclass(frozen=True)
class Options:
    what: Positional[Literal["floor", "grid", "controls", "tilt", "gallery", "cost", "table"]]
    weights: Path = SHIPPED
    """Folder of the networks."""
    out: Path = Path("out/cifar")
    """Folder for the lines and the sheets."""
    reference: Path | None = None
    """Folder of the moments and features of the training images, 58 MB, if not --out. They are computed once."""
    inception: Path | None = None
    """Inception's file, if it is not in the data folder."""
    inception_sha256: str = INCEPTION_SHA256
    """Of the file, if it is your own, such as one in half precision."""
    device: str = "cpu"
    images: int = 10_000
    """In each cell."""
    guidances: tuple[float, ...] = (1.25, 1.5, 1.75)
    steps: tuple[int, ...] = (8, 16, 32)
    particles: tuple[int, ...] = (1, 2, 4, 8, 16)
    seeds: tuple[int, ...] = (0, 1, 2)
    temperature: float = TEMPERATURE
    """By which all logits are divided, but where the controls vary it."""
    temperatures: tuple[float, ...] = (0.7, 0.8, 0.9, 1.0, 1.1)
    """Those of the controls, for each of --guidances: 1 is without guidance."""
    remask: float = REMASK
    """The cap of ReMDM."""
    parts: tuple[Part, ...] = get_args(Part)
    """The first three are of the grid, the others of the controls."""
    kernel: Literal["remdm", "mdm"] = REMDM
    """Of the main part of the grid, of both controls and of the gallery."""
    kernels: tuple[Literal["mdm", "confident", "proposal"], ...] = (MDM, CONFIDENT)
    """Beside it, at one particle; proposal is what many particles of the main part move by."""
    minutes: float | None = None
    """No cell is begun after so many."""
    at_once: int = 4096
    """Particles in a batch."""
    captured: bool = False
    """Replay each batch as a CUDA graph."""
    compiled: bool = False
    """Compile the blocks of the denoiser."""
    tiny: bool = False
    """Random networks and features, on a CPU in seconds."""

    @property
    def middle(self) -> int:
        """The number of steps where it is not varied."""
        return self.steps[len(self.steps) // 2]

    @property
    def guidance(self) -> float:
        """The middle one, where it is not varied."""
        return self.guidances[len(self.guidances) // 2]

    def cell(self, seed: int = 0) -> Cell:
        """What the cells of all tables share."""
        some = Cell(1.0, self.middle, 1, temperature=self.temperature, remask=self.remask)
        return replace(some, images=self.images, seed=seed)


# ---- the cells of each table


def grid(options: Options) -> Iterator[Cell]:
    """Seed by seed, so that a run that is stopped has whole tables."""
    many = [count for count in options.particles if count > 1]
    for seed in options.seeds:
        some = options.cell(seed)
        points = list(product(options.guidances, options.steps))
        if "main" in options.parts:
            main = replace(some, kernel=options.kernel)
            yield from (replace(main, guidance=1.0, steps=count) for count in options.steps)
            for (guidance, steps), particles in product(points, options.particles):
                yield replace(main, guidance=guidance, steps=steps, particles=particles)
        if "kernels" in options.parts:
            for (guidance, steps), kernel in product(points, options.kernels):
                yield replace(some, guidance=guidance, steps=steps, kernel=kernel)
        if "conventions" in options.parts:
            others = [name for name in CONVENTIONS if name != CORRECTED]
            for (guidance, steps), convention, particles in product(points, others, many):
                yield replace(some, guidance=guidance, steps=steps, particles=particles, convention=convention)


def controls(options: Options) -> Iterator[Cell]:
    for seed in options.seeds:
        some = options.cell(seed)
        if "temperatures" in options.parts:
            for guidance, temperature in product(options.guidances, options.temperatures):
                yield replace(some, guidance=guidance, temperature=temperature, kernel=options.kernel)
        if "rows" in options.parts:
            for guidance, steps in product(options.guidances, options.steps):
                for particles in (count for count in options.particles if count > 1):
                    point = replace(some, guidance=guidance, steps=steps, kernel=options.kernel)
                    yield replace(point, particles=particles)
                    yield replace(point, steps=particles * steps)


def tilt(options: Options) -> Iterator[Cell]:
    for seed, name, particles in product(options.seeds, rewards.KLS, options.particles):
        some = replace(options.cell(seed), guidance=options.guidance, particles=particles, reward=name)
        yield some
        if name == rewards.CLASS:  # the size of a file has no gradient of its own
            yield replace(some, gradient=True)


def gallery(options: Options) -> list[Cell]:
    """Without guidance, guided, and guided by weight. Without guidance weights are equal: one particle is enough."""
    some = replace(options.cell(options.seeds[0]), kernel=options.kernel)
    guided = replace(some, guidance=options.guidance)
    return list(dict.fromkeys([some, guided, replace(guided, particles=max(options.particles))]))


TABLES: dict[str, Callable[[Options], Iterator[Cell]]] = {"grid": grid, "controls": controls, "tilt": tilt}


# ---- running


@dataclass(frozen=True, eq=False)
class Bench:
    options: Options
    networks: Networks
    data: Callable[[], Data]
    instruments: Instruments
    inception: str
    began: float

    @cached_property
    def made_by(self) -> dict[str, str]:
        """What a line depends on beside its cell."""
        return {"weights": weights_of(self.networks), "inception": self.inception}

    @property
    def device(self) -> str:
        return device_name(self.networks.device)

    @property
    def late(self) -> bool:
        minutes = self.options.minutes
        return minutes is not None and time.perf_counter() - self.began > 60 * minutes

    def cells(self, file: Path, cells: Sequence[Cell]) -> None:
        known = {row.get("key") for row in finished(file)}
        for cell in dict.fromkeys(cells):
            key = key_of(asdict(cell), self.made_by)
            if key in known:
                continue
            if self.late:
                say(f"Stopped after {self.options.minutes:g} minutes; the same command goes on")
                return
            drawn = Drawn()
            images = drawn_images(cell, self.networks, drawn, self.options.at_once, self.options.captured)
            found = self.instruments(images)
            row = {
                "key": key,
                "name": cell.name,
                **self.made_by,
                **asdict(cell),
                **found,
                **asdict(drawn),
                "device": self.device,
            }
            add(file, row)
            say(f"{cell.name}, seed {cell.seed}: FID {row['fid']:.3f}, accuracy {row['accuracy'][0]:.3f}, "
                f"ESS {row['ess']:.3f}, {row['rows']:,} rows, {row['seconds']:.1f} s")  # fmt: skip

    def floor(self, file: Path) -> None:
        """Real images, and those that the tokeniser gives back."""
        known = {row.get("key") for row in finished(file)}
        images = self.data()
        train, test = images.train, images.test
        few = Images(train.pixels[: len(test.pixels)], train.labels[: len(test.pixels)])
        for name, some, decoded in (
            ("test images", test, False),
            ("some training images", few, False),
            ("reconstructions of test images", test, True),
            ("reconstructions of training images", train, True),
        ):
            key = key_of({"name": name}, self.made_by)
            if key not in known:
                found = self.instruments(self.real(some, decoded))
                add(file, {"key": key, "name": name, **self.made_by, **found, "device": self.device})
                say(f"{name}: done")

    def real(self, images: Images, decoded: bool) -> Iterator[Batch]:
        for pixels, labels in zip(images.pixels.split(2000), images.labels.split(2000), strict=True):
            found = pixels.to(self.networks.device)
            found = reconstructed(self.networks.tokeniser, found) if decoded else found
            yield found, labels.to(found.device)


def networks_of(options: Options) -> Networks:
    """The networks, and nothing else: neither images nor published networks."""
    if torch.device(options.device).type == "cuda":
        torch.set_float32_matmul_precision("high")
    networks = load_networks(Setup(device=options.device, weights=options.weights))
    if options.compiled:
        for block in networks.denoiser.blocks:  # one compilation serves all blocks; the whole network takes minutes
            block.compile(dynamic=True)
    return networks


def prepared(options: Options, networks: Networks, began: float) -> Bench:
    """With what measures images. The training images are read only if their reference is not there."""
    images, device, inception = cache(data), networks.device, options.inception_sha256
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    features = load_inception(options.inception, sha256=inception, device=device, dtype=dtype, rows=500)
    try:
        scores = load_efficientnet(device=device)
    except FileNotFoundError as error:
        say(f"No Inception-like score: {error}")
        scores = None
    reference = reference_of(images, features, options.reference or options.out, device, inception)
    return Bench(options, networks, images, Instruments(features, scores, networks, reference), inception, began)


def tiny(options: Options, networks: Networks, began: float) -> Bench:
    """The same with random images and features."""
    features = cifar_tiny.features()
    reference = reference_of(cifar_tiny.data, features, options.out, networks.device, "tiny")
    instruments = Instruments(features, lambda x: networks.judge(x.float() / 255), networks, reference, least=20)
    return Bench(options, networks, cifar_tiny.data, instruments, "tiny", began)


def smallest(options: Options, folder: Path) -> Options:
    """At a size for tests."""
    sizes: dict[str, Any] = {"images": 20, "guidances": (1.5,), "steps": (2,), "particles": (1, 2), "seeds": (0,)}
    return replace(options, out=folder, at_once=16, **sizes)


def main(options: OmitArgPrefixes[Options]) -> None:
    if options.what == "table":
        for file in sorted(options.out.glob("*.jsonl")):
            rows = [row for row in finished(file) if "fid" in row]
            if rows:
                say(f"\n{file.stem}\n\n{table(rows)}")
        return
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        options = smallest(options, Path(folder)) if options.tiny else options
        cells = list(TABLES[options.what](options)) if options.what in TABLES else []
        if options.what in TABLES and not cells:
            raise SystemExit(f"{options.what} has none of the parts {', '.join(options.parts)}: see --help")
        networks = cifar_tiny.networks() if options.tiny else networks_of(options)
        file = options.out / f"{options.what}.jsonl"
        if options.what == "gallery":
            for sheet in write_gallery(gallery(options), networks, options.out, options.at_once, options.captured):
                say(f"{sheet}")
        elif options.what == "cost":
            some = replace(options.cell(), guidance=options.guidance)
            for line in cost(some, networks, file, options.at_once, tries=1 if options.tiny else 5):
                say(line)
        else:
            bench = (tiny if options.tiny else prepared)(options, networks, began)
            if options.what == "floor":
                bench.floor(file)
            else:
                bench.cells(file, cells)
            say("\n" + table(finished(file)))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    tyro.cli(main, description=DESCRIPTION, config=(tyro.conf.FlagCreatePairsOff,))
