"""The cells of the tables of `cifar`: what is sampled, how, and the files in which finished cells are kept."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

import tokensteer as ts
from tokensteer.core.models.product import denoiser_powers, paper_powers
from tokensteer.core.particles.triggers import ess_below, never
from tokensteer.core.steering.methods import Method
from tokensteer.core.steering.steering import Steering
from tokensteer.core.twists.estimators import Sampled
from tokensteer.tasks.cifar import model as models
from tokensteer.tasks.cifar import rewards
from tokensteer.tasks.cifar.data import CLASSES
from tokensteer.tasks.cifar.model import Networks
from tokensteer.train.frozen import fingerprint

REMDM, MDM, CONFIDENT, PROPOSAL = "remdm", "mdm", "confident", "proposal"
CORRECTED, CORRECTED_AHEAD, PAPER, PAPER_AHEAD = "corrected", "corrected, look-ahead", "paper", "paper, look-ahead"
CONVENTIONS: dict[str, dict[str, Any]] = {
    CORRECTED: {"convention": denoiser_powers, "correct_remasking": True, "lookahead": False},
    CORRECTED_AHEAD: {"convention": denoiser_powers, "correct_remasking": True, "lookahead": True},
    PAPER: {"convention": paper_powers, "correct_remasking": False, "lookahead": False},
    PAPER_AHEAD: {"convention": paper_powers, "correct_remasking": False, "lookahead": True},
}
"""How a product is weighted (docs/guidance.md). Powers sum to one, so the paper's differs from ours in one thing: it
counts a site again each time it is remasked. Either may look ahead."""


VERSION = 2
"""Of what the names in a cell stand for: files of another version are of other samplers, and are not skipped."""


@dataclass(frozen=True)
class Cell:
    """One number of images from one way of sampling. With a `reward` the product is tilted by it, and classes are
    drawn one after the other; `gradient` adds the gradient proposal. `remask` is the cap of ReMDM. The kernel
    "proposal" is what many particles of a corrected product move by, ReMDM with tokens drawn given what is left."""

    guidance: float
    steps: int
    particles: int
    kernel: str = REMDM
    convention: str = CORRECTED
    temperature: float = 1.0
    remask: float = models.REMASK
    reward: str | None = None
    gradient: bool = False
    images: int = 10_000
    seed: int = 0

    @property
    def name(self) -> str:
        """All but the seed, in words."""
        words = [f"a = {self.guidance:g}", f"T = {self.steps}", f"N = {self.particles}", self.kernel]
        if self.kernel in (REMDM, PROPOSAL) and self.remask != models.REMASK:
            words[-1] += f" {self.remask:g}"
        if self.particles > 1:
            words.append(self.convention)
        if self.temperature != 1:
            words.append(f"temperature {self.temperature:g}")
        if self.reward is not None:
            words.append(self.reward + (", gradient" if self.gradient else ""))
        return ", ".join(words)


def method_of(cell: Cell, networks: Networks, labels: Sequence[int]) -> Method:
    """The method of a cell for populations of these classes. One particle has no weights to compute."""
    networks = replace(networks, temperature=cell.temperature)
    if cell.kernel == CONFIDENT:
        if cell.particles > 1 or cell.reward is not None:
            raise ValueError("confident sampling has one particle and no weights: choose remdm or mdm")
        return Method(Steering(models.confident(networks, labels, cell.steps, cell.guidance)), when=never)
    remask = cell.remask if cell.kernel in (REMDM, PROPOSAL) else 0.0
    conditional = models.model(networks, labels, cell.steps, remask)
    alone = cell.particles == 1 and cell.reward is None
    if cell.guidance == 1 and alone:
        return Method(Steering(conditional), when=never)
    usual = alone and cell.kernel != PROPOSAL
    product = models.product(conditional, cell.guidance, **CONVENTIONS[PAPER if usual else cell.convention])
    tilt = None if cell.reward is None else rewards.tilt(networks, labels, cell.reward)
    if tilt is not None:  # its noise is shared by all particles of a run, and is another one for each seed
        tilt = replace(tilt, estimator=Sampled(cell.seed))
    proposal = ts.Gradient(ts.Guided(), clip=1.0, tokens_only=True) if cell.gradient else ts.Guided()
    return Method(Steering(product, tilt, proposal), when=never if alone else ess_below(0.5))


@dataclass
class Drawn:
    """Costs and diagnostics of a cell, filled in while its images are drawn."""

    seconds: float = 0.0
    rows: int = 0
    populations: int = 0
    ess: float = 0.0
    least_ess: float = 0.0
    reward: float | None = None

    def see(self, result: ts.Result, seconds: float) -> None:
        count, particles = result.log_w.shape
        share = result.ess / particles
        self.seconds += seconds
        self.rows += sum(number for name, number in result.rows.items() if name != "reward")
        before, self.populations = self.populations, self.populations + count
        self.ess = (before * self.ess + count * float(share[-1].mean())) / self.populations
        self.least_ess = (before * self.least_ess + count * float(share.amin(0).mean())) / self.populations
        if result.reward is not None:
            here = float((result.weights * result.reward).sum(-1).mean())
            self.reward = (before * (self.reward or 0.0) + count * here) / self.populations


def drawn_images(
    cell: Cell, networks: Networks, drawn: Drawn, at_once: int = 4096, captured: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """The images of a cell in batches of about `at_once` particles, one image from each population by its weight, with
    the classes in turn; and their labels."""
    generator = Generator(networks.device).manual_seed(cell.seed)
    everything = list(range(len(CLASSES)))
    groups = [everything] if cell.reward is None else [[label] for label in everything]
    for labels in groups:
        wanted = -(-cell.images // len(groups))
        batches = max(1, -(-wanted * cell.particles // at_once))
        populations = -(-wanted // (batches * len(labels))) * len(labels)
        method = method_of(cell, networks, labels)
        replay = _captured(method, cell, populations) if captured and networks.device.type == "cuda" else None
        left = wanted
        for _ in range(batches):
            if left <= 0:
                break
            began = now(networks.device)
            run = replay or (lambda generator, m=method, p=populations: m(cell.particles, p, generator=generator))
            result: ts.Result = run(generator=generator)
            drawn.see(result, now(networks.device) - began)
            ids = result.sample(generator=generator)[:, 0]
            each = populations // len(labels)
            ids = ids.view(len(labels), each, -1).transpose(0, 1).flatten(0, 1)[:left]  # classes in turn
            found = torch.tensor(labels, device=ids.device).repeat(each)[: len(ids)]
            left -= len(ids)
            yield networks.pixels(ids), found


def _captured(method: Method, cell: Cell, populations: int) -> Any:
    """The run as a CUDA graph; None where the host reads the device on the way."""
    if cell.kernel == CONFIDENT or cell.reward == rewards.COMPRESSIBILITY:
        return None
    return ts.captured(method, cell.particles, populations)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# ---- files


def weights_of(networks: Networks) -> str:
    """A fingerprint of all four networks."""
    parts = (networks.tokeniser, networks.denoiser, networks.reward, networks.judge)
    return fingerprint(value for part in parts for value in cast("nn.Module", part).state_dict().values())


def key_of(what: Mapping[str, Any], made_by: Mapping[str, str]) -> str:
    """What a line is of, with the networks and the measure: a line with the same key is not made again."""
    return json.dumps({**what, **made_by, "version": VERSION}, sort_keys=True)


def is_current(row: Mapping[str, Any]) -> bool:
    """Whether a line is of this version. Lines without a key, such as those of costs, have none."""
    return "key" not in row or json.loads(row["key"]).get("version") == VERSION


def finished(file: Path) -> list[dict[str, Any]]:
    """The cells in a file, without a last line that was cut off."""
    if not file.is_file():
        return []
    found: list[dict[str, Any]] = []
    for line in file.read_text("utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def add(file: Path, row: Mapping[str, Any]) -> None:
    """Append a line, and flush it: a process that is killed keeps its cells."""
    file.parent.mkdir(parents=True, exist_ok=True)
    whole = not file.is_file() or file.read_bytes()[-1:] in (b"", b"\n")  # else the last line was cut off
    with file.open("a", encoding="utf-8") as handle:
        handle.write(("" if whole else "\n") + json.dumps(row) + "\n")


COLUMNS = {
    "fid": "FID",
    "extrapolated fid": "FID, n → ∞",
    "kid": "1000 KID",
    "score": "IS-like",
    "judge score": "judge's score",
    "accuracy": "accuracy",
    "precision": "precision",
    "recall": "recall",
    "reward": "reward",
    "ess": "ESS/N",
    "rows": "rows",
    "seconds": "s",
}


APART = ("name", "images", "weights", "inception")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A markdown table of this version's rows: means over seeds, with standard deviations in brackets. Rows of other
    numbers of images, of other networks or measured by another Inception stand apart."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    rows = [row for row in rows if is_current(row)]
    for row in rows:
        groups.setdefault(tuple(row.get(name) for name in APART), []).append(row)
    names = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    head = " | ".join(COLUMNS[name] for name in names)
    lines = [f"| | images | seeds | {head} |", "|---" * (3 + len(names)) + "|"]
    for (name, images, *_), group in groups.items():
        cells = [_shown([row[column] for row in group if row.get(column) is not None], column) for column in names]
        lines.append(f"| {name} | {images:,} | {len(group)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(values: Sequence[Any], column: str) -> str:
    if not values:
        return ""
    numbers = [value[0] if isinstance(value, list) else value for value in values]
    numbers = [1000 * number for number in numbers] if column == "kid" else numbers
    if column == "rows":
        return f"{mean(numbers):,.0f}"
    spread = f" ({stdev(numbers):.2g})" if len(numbers) > 1 else ""
    return f"{mean(numbers):.4g}{spread}"
