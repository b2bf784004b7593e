"""DNA words of eight letters, towards those that a transcription factor binds, with an exact target.

The binding of a factor was measured for all 65,536 words (protein binding microarrays), so the target
p(x) · exp(E(x)/kl), with E the enrichment score from -0.5 to 0.5, is a table that samples are compared with. The prior
p is a table too, with an exact denoiser: all words are equally likely, or p is a Markov chain fitted to the words that
some factor binds. Letters are opened one at a time (`FirstHitting`), so the model has the distribution p without
discretisation error, and always eight steps.

The data do not come with the package: files NAME_8mers.txt of columns 8-mer, its other strand, E-score, somewhere in
the folder tfbind8 of TOKENSTEER_DATA. docs/tfbind.md has their source and results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor

from tokensteer.core.kernels.jumps import FirstHitting, event_steps
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.template import template
from tokensteer.core.particles.result import Result
from tokensteer.tasks.common.metrics import Measured, ess_share, measured, tv, tv_floor, weighted
from tokensteer.tasks.common.tables import Multilinear, TableDenoiser, tilt, with_masks
from tokensteer.tasks.common.task import Setup, Task, data_folder
from tokensteer.tasks.dna.data import LETTERS, MASK, read_letters, reverse_complement
from tokensteer.tasks.dna.output import picture

NAME, FITTED = "tfbind", "tfbind-fitted"
LENGTH = 8
KL = 0.1
FACTOR = "SIX6"
BOUND = 0.4  # the least E-score of a bound word, for the fitted prior
SUFFIX = "_REF_R1_8mers.txt"  # of the files that are read: the first replicate of each factor without mutations


def diffusion(prior: Tensor) -> Diffusion:
    """The masked model of a distribution, a table with an axis for each site."""
    canvas, exact = template(prior.dim(), MASK), TableDenoiser(Multilinear(with_masks(prior)))
    return Diffusion(exact, FirstHitting(MASK), event_steps(canvas, MASK), canvas)


@dataclass(frozen=True, eq=False)
class Target:
    """The normalised p(x) · exp(score(x)/kl) over all S words in lexicographic order, (S,), and log Z."""

    pmf: Tensor
    log_z: float

    @property
    def perplexity(self) -> float:
        """The number of equally likely words with the same entropy."""
        return float((-(self.pmf * self.pmf.log()).sum()).exp())

    def histogram(self, samples: Tensor, weights: Tensor) -> Tensor:
        """The pmf (S,) of samples (..., L) with weights (...)."""
        place = len(LETTERS) ** torch.arange(samples.shape[-1] - 1, -1, -1)
        index = (samples * place).sum(-1).flatten()
        mass = torch.zeros_like(self.pmf).index_add(0, index, weights.flatten().to(self.pmf))
        return mass / mass.sum()

    def tv(self, pmf: Tensor) -> float:
        """The total variation distance."""
        return tv(pmf, self.pmf)

    def divergence(self, pmf: Tensor) -> float:
        """KL(pmf | target) in nats."""
        seen = pmf > 0
        return float((pmf[seen] * (pmf[seen] / self.pmf[seen]).log()).sum())

    def tv_floor(self, count: float) -> float:
        """The expected TV of `count` exact draws."""
        return tv_floor(self.pmf, count)

    def divergence_floor(self, count: int, repeats: int = 10) -> float:
        """The mean divergence of `count` exact draws, estimated."""
        generator = Generator().manual_seed(0)
        draws = torch.multinomial(self.pmf, count * repeats, replacement=True, generator=generator).view(repeats, -1)
        pmfs = (torch.bincount(index, minlength=len(self.pmf)).to(self.pmf) / count for index in draws)
        return sum(map(self.divergence, pmfs)) / repeats


def target(prior: Tensor, score: Tensor, kl: float = KL) -> Target:
    log_mass = prior.log().flatten() + score.flatten() / kl
    return Target(log_mass.softmax(0), float(log_mass.logsumexp(0)))


@dataclass(frozen=True)
class Metrics:
    """Distances of weighted samples to the target, for each population, or for all together if they are of one sample.

    "tv/iid" is the TV over the mean TV of equally many exact draws, "tv/iid(ESS)" over that of ESS exact draws.
    """

    target: Target
    score: Tensor

    def __call__(self, result: Result) -> Mapping[str, Measured]:
        weights, samples = result.weights.double(), result.samples
        reward = weighted(result, self.score[tuple(samples.unbind(-1))])
        if weights.shape[1] == 1:
            weights, samples = weights.view(1, -1) / len(weights), samples.view(1, -1, samples.shape[-1])
        pmfs = [self.target.histogram(x, w) for x, w in zip(samples, weights, strict=True)]
        tv = torch.tensor([self.target.tv(pmf) for pmf in pmfs], dtype=torch.float64)
        ess = 1.0 / weights.square().sum(-1)
        floors = torch.tensor([self.target.tv_floor(float(n)) for n in ess], dtype=torch.float64)
        divergence = torch.tensor([self.target.divergence(pmf) for pmf in pmfs])
        count = weights.shape[1]
        return {
            "tv": measured(tv),
            "tv/iid": measured(tv / self.target.tv_floor(count)),
            "tv/iid(ESS)": measured(tv / floors),
            "kl": measured(divergence),
            "kl/iid": measured(divergence / self.target.divergence_floor(count)),
            "reward": reward,
            "exact log_z": Measured(self.target.log_z, 0.0),
            "ess": ess_share(result),
        }


def files() -> dict[str, Path]:
    """The files of all factors by name."""
    folder = data_folder() / "tfbind8"
    found = {file.name.removesuffix(SUFFIX): file for file in sorted(folder.rglob(f"*{SUFFIX}"))}
    if not found:
        raise FileNotFoundError(
            f"there is no *{SUFFIX} in {folder}: set TOKENSTEER_DATA to the folder that holds tfbind8 with the tables "
            "of 8-mers; docs/tfbind.md says where they are from"
        )
    return dict(sorted(found.items()))


def read(file: Path) -> Tensor:
    """The E-scores of all words, with an axis of A, C, G, T for each letter. Both strands of a word have the same."""
    header, _, body = file.read_text().partition("\n")
    names, cells = header.split("\t"), body.split()
    if names[2:3] != ["E-score"] or len(cells) % len(names):
        raise ValueError(f"{file} is no table of 8-mers: its columns must be 8-mer, 8-mer, E-score, ...")
    ids = read_letters(cells[:: len(names)])
    scores = torch.as_tensor(np.array(cells[2 :: len(names)], dtype=np.float64))
    table = torch.full([len(LETTERS)] * ids.shape[1], math.nan, dtype=torch.float64)
    for strand in (ids, reverse_complement(ids)):
        table[tuple(strand.unbind(-1))] = scores
    if table.isnan().any():
        raise ValueError(f"{file} lacks {int(table.isnan().sum())} of {table.numel()} words")
    return table


def uniform(length: int = LENGTH) -> Tensor:
    """All words equally likely."""
    return torch.full([len(LETTERS)] * length, float(len(LETTERS)) ** -length, dtype=torch.float64)


def chain(weights: Tensor, pseudocount: float = 1.0) -> Tensor:
    """The inhomogeneous Markov chain p(x) = p(x_1) · prod p(x_l+1 | x_l) fitted to words with these weights (an axis
    for each letter). `pseudocount` uniform words make all words possible."""
    length, size = weights.dim(), weights.shape[0]
    weights = weights + pseudocount / weights.numel()
    pmf = weights.sum(tuple(range(1, length)))
    pmf = pmf / pmf.sum()
    for place in range(1, length):
        pairs = weights.sum(tuple(k for k in range(length) if k not in (place - 1, place)))
        pmf = pmf.unsqueeze(-1) * (pairs / pairs.sum(-1, keepdim=True)).view(*[1] * (place - 1), size, size)
    return pmf


@cache
def fitted(names: tuple[Path, ...], bound: float = BOUND) -> Tensor:
    """A Markov chain of the words that some factor binds, with equal weights of the factors."""
    shares = [(score >= bound).double() / max(1, int((score >= bound).sum())) for score in map(read, names)]
    return chain(100.0 * torch.stack(shares).mean(0))


def task(setup: Setup, fit: bool = False) -> Task:
    """Towards words that a factor binds; the goal is its place among the sorted names. The prior is uniform, or fitted
    to the words that some factor binds."""
    setup.refuse_reward(NAME)
    if setup.device != "cpu" or setup.remask:
        raise ValueError("tfbind runs on the CPU and opens one letter at a time: leave out --device and --remask")
    known = files()
    names = list(known)
    default = names.index(FACTOR) if FACTOR in names else 0
    goal = default if setup.goal is None else setup.goal
    if not 0 <= goal < len(names):
        listed = ", ".join(f"{i} {name}" for i, name in enumerate(names))
        raise ValueError(f"--goal must be one of {len(names)} factors, got {goal}: {listed}")
    score = read(known[names[goal]])
    prior = fitted(tuple(known.values())) if fit else uniform()
    kl = KL if setup.kl is None else setup.kl
    aim = target(prior, score, kl)
    return Task(
        FITTED if fit else NAME,
        f"words of {LENGTH} letters, towards those that {names[goal]} binds. The target has a perplexity of "
        f"{aim.perplexity:.0f} words and a mean reward of {float((aim.pmf * score.flatten()).sum()):.4f}",
        diffusion(prior),
        tilt(prior, score, kl),
        Metrics(aim, score),
        picture,
        goal=goal,
    )


fitted_task = partial(task, fit=True)
