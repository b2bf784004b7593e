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
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import tyro
from tyro.conf import OmitArgPrefixes, Positional

import tokensteer as ts
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
    drawn_images,
    finished,
    key_of,
    method_of,
    now,
    table,
    weights_of,
)
from benchmarks.cifar_quality import Batch, Instruments, reference_of
from tokensteer.tasks.cifar import rewards
from tokensteer.tasks.cifar.data import CLASSES, Data, Images, data
from tokensteer.tasks.cifar.model import REMASK, TEMPERATURE, Networks, load_networks
from tokensteer.tasks.common.sheets import write_sheet
from tokensteer.tasks.common.task import SHIPPED, Setup
from tokensteer.tasks.common.tokenised_images import reconstructed
from tokensteer.tasks.quality.features import INCEPTION_SHA256, load_inception
from tokensteer.tasks.quality.imagenet import load_efficientnet

Part = Literal["main", "kernels", "conventions", "temperatures", "rows"]
DESCRIPTION = """\
floor: FID and KID of the test images and of the tokeniser's reconstructions against the training images. grid:
guidances x steps x particles with remasking, then the samplers at one particle, then the conventions of products.
controls: temperatures at one particle, and N particles x T steps against one particle with as many rows. tilt: rewards
beside the product, with and without gradients. gallery: sheets of samples. cost: seconds for 1,000 images, and a
steered step in forward passes. table: what the files of a folder hold. Cells are written as they finish, and those that
are there are skipped."""


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
    remask: float = REMASK
    """The cap of ReMDM."""
    parts: tuple[Part, ...] = get_args(Part)
    """The first three are of the grid, the others of the controls."""
    kernel: Literal["remdm", "mdm"] = REMDM
    """Of the main part of the grid, and of the rows."""
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
            for guidance, temperature in product((1.0, *options.guidances), (0.7, 0.8, 0.9, 1.0, 1.1)):
                for kernel in (REMDM, MDM):
                    yield replace(some, guidance=guidance, temperature=temperature, kernel=kernel)
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


TABLES: dict[str, Callable[[Options], Iterator[Cell]]] = {"grid": grid, "controls": controls, "tilt": tilt}


# ---- running


@dataclass(frozen=True, eq=False)
class Bench:
    options: Options
    networks: Networks
    data: Data
    instruments: Instruments
    inception: str
    began: float

    @cached_property
    def made_by(self) -> dict[str, str]:
        """What a line depends on beside its cell."""
        return {"weights": weights_of(self.networks), "inception": self.inception}

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
                "device": device_name(self),
            }
            add(file, row)
            say(f"{cell.name}, seed {cell.seed}: FID {row['fid']:.3f}, accuracy {row['accuracy'][0]:.3f}, "
                f"ESS {row['ess']:.3f}, {row['rows']:,} rows, {row['seconds']:.1f} s")  # fmt: skip

    def floor(self, file: Path) -> None:
        """Real images, and those that the tokeniser gives back."""
        known = {row.get("key") for row in finished(file)}
        train, test = self.data.train, self.data.test
        few = Images(train.pixels[: len(test.pixels)], train.labels[: len(test.pixels)])
        for name, images, decoded in (
            ("test images", test, False),
            ("some training images", few, False),
            ("reconstructions of test images", test, True),
            ("reconstructions of training images", train, True),
        ):
            key = key_of({"name": name}, self.made_by)
            if key not in known:
                found = self.instruments(self.real(images, decoded))
                add(file, {"key": key, "name": name, **self.made_by, **found, "device": device_name(self)})
                say(f"{name}: done")

    def real(self, images: Images, decoded: bool) -> Iterator[Batch]:
        for pixels, labels in zip(images.pixels.split(2000), images.labels.split(2000), strict=True):
            found = pixels.to(self.networks.device)
            found = reconstructed(self.networks.tokeniser, found) if decoded else found
            yield found, labels.to(found.device)

    def gallery(self) -> None:
        """Ten classes x 8, drawn by weight. Without guidance all weights are equal, so one particle is enough."""
        options, steps = self.options, self.options.middle
        for guidance, particles in ((1.0, 1), (options.guidance, 1), (options.guidance, max(options.particles))):
            cell = replace(options.cell(), guidance=guidance, particles=particles, images=8 * len(CLASSES))
            drawn = drawn_images(cell, self.networks, Drawn(), options.at_once, options.captured)
            images = torch.cat([part for part, _ in drawn])
            by_class = images.view(8, len(CLASSES), *images.shape[1:]).transpose(0, 1).flatten(0, 1)
            file = options.out / f"samples-a{guidance:g}-t{steps}-n{particles}.png"
            write_sheet(file, by_class, 8)
            say(f"{file}")

    def cost(self, file: Path) -> None:
        """Seconds for images of one particle, and a steered step in forward passes of both networks."""
        steps, gpu = self.options.middle, self.networks.device.type == "cuda"
        images = min(1000, self.options.images)
        for captured in (False, True) if gpu else (False,):
            cell = replace(self.options.cell(), guidance=self.options.guidance, images=images)
            for _ in range(2):  # the first run is to warm up
                drawn = Drawn()
                began = now(self.networks.device)
                for _part in drawn_images(cell, self.networks, drawn, images, captured):
                    pass
                whole = now(self.networks.device) - began
            say(f"{images} images, T = {steps}, N = 1{', captured' if captured else ''}: {drawn.seconds:.2f} s of "
                f"sampling, {whole:.2f} s with decoding and capture")  # fmt: skip
            add(file, {"name": "images", "captured": captured, "images": images, **asdict(drawn)})
        particles, populations = 16, max(10, self.options.at_once // 160 * 10)
        rows = particles * populations
        x = torch.randint(self.networks.mask, (rows, self.networks.denoiser.config.length), device=self.networks.device)
        labels = torch.arange(rows, device=x.device) % len(CLASSES)
        for kernel in (MDM, REMDM):
            cell = replace(self.options.cell(), guidance=self.options.guidance, particles=particles, kernel=kernel)
            method = method_of(cell, self.networks, list(range(len(CLASSES))))
            passes = self._best(lambda: [self.networks.logits(x, labels) for _ in range(2)])
            eager = self._best(lambda m=method: m(particles, populations)) / steps
            run = ts.captured(method, particles, populations) if gpu else None
            replayed = None if run is None else self._best(lambda r=run: r()) / steps
            times = {"passes": passes, "eager": eager, "captured": replayed, "rows": rows}
            add(file, {"name": f"step, {kernel}", **times})
            quick = "" if replayed is None else f", captured {replayed / passes:.2f}"
            say(f"A step, {kernel}, {rows:,} particles, {5e5 * passes / rows:.1f} µs a row: {eager / passes:.2f} times "
                f"the two networks{quick}")  # fmt: skip

    def _best(self, run: Callable[[], Any]) -> float:
        """The least seconds of a few calls, after one to warm up."""
        found: list[float] = []
        for _ in range(2 if self.options.tiny else 6):
            began = now(self.networks.device)
            with torch.no_grad():
                run()
            found.append(now(self.networks.device) - began)
        return min(found[1:])


def device_name(bench: Bench) -> str:
    return torch.cuda.get_device_name() if bench.networks.device.type == "cuda" else "CPU"


def prepared(options: Options) -> Bench:
    began, device = time.perf_counter(), torch.device(options.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    networks = load_networks(Setup(device=options.device, weights=options.weights))
    if options.compiled:
        for block in networks.denoiser.blocks:  # one compilation serves all blocks; the whole network takes minutes
            block.compile(dynamic=True)
    images, dtype = data(), torch.float16 if device.type == "cuda" else torch.float32
    features = load_inception(options.inception, sha256=options.inception_sha256, device=device, dtype=dtype, rows=500)
    try:
        scores = load_efficientnet(device=device)
    except FileNotFoundError as error:
        say(f"No Inception-like score: {error}")
        scores = None
    inception = options.inception_sha256
    reference = reference_of(images, features, options.reference or options.out, device, inception)
    return Bench(options, networks, images, Instruments(features, scores, networks, reference), inception, began)


def tiny(options: Options, folder: Path) -> Bench:
    """The same with random networks and features, at a size for tests."""
    networks, images, features = cifar_tiny.networks(), cifar_tiny.data(), cifar_tiny.features()
    sizes: dict[str, Any] = {"images": 20, "guidances": (1.5,), "steps": (2,), "particles": (1, 2), "seeds": (0,)}
    options = replace(options, out=folder, at_once=16, **sizes)
    reference = reference_of(images, features, folder, networks.device, "tiny")
    instruments = Instruments(features, lambda x: networks.judge(x.float() / 255), networks, reference, least=20)
    return Bench(options, networks, images, instruments, "tiny", time.perf_counter())


def main(options: OmitArgPrefixes[Options]) -> None:
    if options.what == "table":
        for file in sorted(options.out.glob("*.jsonl")):
            rows = [row for row in finished(file) if "fid" in row]
            if rows:
                say(f"\n{file.stem}\n\n{table(rows)}")
        return
    with tempfile.TemporaryDirectory() as folder:
        bench = tiny(options, Path(folder)) if options.tiny else prepared(options)
        file = bench.options.out / f"{options.what}.jsonl"
        if options.what in TABLES:
            cells = list(TABLES[options.what](bench.options))
            if not cells:
                raise SystemExit(f"{options.what} has none of the parts {', '.join(options.parts)}: see --help")
            bench.cells(file, cells)
        else:
            {"floor": lambda: bench.floor(file), "gallery": bench.gallery, "cost": lambda: bench.cost(file)}[
                options.what
            ]()
        if options.what in (*TABLES, "floor"):
            say("\n" + table(finished(file)))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    tyro.cli(main, description=DESCRIPTION, config=(tyro.conf.FlagCreatePairsOff,))
