"""Words of eight letters of DNA, towards those that a transcription factor binds: measured, and exact.

How strongly a factor binds was measured for all 65,536 words (protein binding microarrays), so the target
p(x) · exp(E(x)/kl), with E the enrichment score from -0.5 to 0.5, is a table, and what a sampler gives can be held to
it. The prior p is a table too, and its denoiser exact: either all words are equally likely, or p is a Markov chain
fitted to the words that some factor binds. Words are opened one letter at a time (`FirstHitting`), so the law of the
model is p itself, without an error of discretisation; the number of steps is eight, whatever was asked for.

The data do not come with the package: files NAME_8mers.txt of columns 8-mer, its other strand, E-score, somewhere
in the folder tfbind8 of TOKENSTEER_DATA. docs/tfbind.md says where they are from, and what came out.
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
from torch.nn.functional import pad

from tokensteer.core.kernels.jumps import FirstHitting, event_steps
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.template import template
from tokensteer.core.particles.result import Result
from tokensteer.core.twists.estimators import Value
from tokensteer.core.twists.ramps import constant as constant_ramp
from tokensteer.core.twists.tilt import Tilt
from tokensteer.tasks.common.metrics import Measured, measured
from tokensteer.tasks.common.task import Setup, Task, data_folder
from tokensteer.tasks.dna.data import LETTERS, MASK, reverse_complement
from tokensteer.tasks.dna.output import picture
from tokensteer.tasks.dna.tables import Multilinear, TableDenoiser, with_masks

NAME, FITTED = "tfbind", "tfbind-fitted"
LENGTH = 8
KL = 0.1
FACTOR = "SIX6"
BOUND = 0.4
"""The E-score from which a word counts as bound, where a prior is fitted to such words."""
SUFFIX = "_REF_R1_8mers.txt"
"""Of files that are used: the first replicate of each factor without mutations."""


def diffusion(law: Tensor) -> Diffusion:
    """The masked model whose samples have this law, a table with an axis for each site."""
    canvas = template(law.dim(), MASK)
    return Diffusion(TableDenoiser(Multilinear(with_masks(law))), FirstHitting(MASK), event_steps(canvas, MASK), canvas)


def soft_value(law: Tensor, score: Tensor, kl: float) -> Value:
    """kl · log E[exp(score/kl) | x_t] for all x_t: what a half-finished word is worth, exactly."""
    value = Multilinear(kl * (with_masks(law * (score / kl).exp()).log() - with_masks(law).log()))
    return Value(lambda x, t: value(x), ignores_time=True)


def tilt(law: Tensor, score: Tensor, kl: float = KL) -> Tilt:
    """Towards high scores. The value on the way is known, and with it the reward counts from the start."""
    reward = Multilinear(pad(score, (0, 1) * score.dim()))  # for one-hots, which have a mask too
    return Tilt(reward, kl, constant_ramp, estimator=soft_value(law, score, kl), differentiable=True)


# ---- the target


@dataclass(frozen=True, eq=False)
class Target:
    """p(x) · exp(score(x)/kl), normalised: its `law` over all words, lexicographically, and log Z."""

    law: Tensor
    log_z: float

    @property
    def perplexity(self) -> float:
        """How many equally likely words would be as uncertain."""
        return float((-(self.law * self.law.log()).sum()).exp())

    def histogram(self, samples: Tensor, weights: Tensor) -> Tensor:
        """The weight (S,) that samples (..., L) with weights (...) give to each word."""
        place = len(LETTERS) ** torch.arange(samples.shape[-1] - 1, -1, -1)
        index = (samples * place).sum(-1).flatten()
        mass = torch.zeros_like(self.law).index_add(0, index, weights.flatten().to(self.law))
        return mass / mass.sum()

    def tv(self, law: Tensor) -> float:
        """Total variation, half of the sum of |law - target|."""
        return float((law - self.law).abs().sum() / 2)

    def divergence(self, law: Tensor) -> float:
        """KL(law | target) in nats."""
        seen = law > 0
        return float((law[seen] * (law[seen] / self.law[seen]).log()).sum())

    def tv_floor(self, count: float) -> float:
        """The expected TV of so many exact draws, in closed form: de Moivre's mean deviation of a binomial. Numbers in
        between are taken in between."""
        low = max(1, math.floor(count))
        part = min(1.0, max(0.0, count - low))
        return (1.0 - part) * self._tv_floor(low) + part * self._tv_floor(low + 1)

    def _tv_floor(self, count: int) -> float:
        k = (count * self.law).floor()
        n = torch.tensor(float(count), dtype=self.law.dtype)
        log_ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma((n - k).clamp(min=1))  # (k + 1)·C(n, k + 1)
        log_deviation = log_ways + (k + 1) * self.law.log() + (n - k) * torch.log1p(-self.law)
        return float(torch.where(k < n, log_deviation.exp(), 0.0).sum() / n)

    def divergence_floor(self, count: int, repeats: int = 10) -> float:
        """The mean divergence of so many exact draws, from a few trials."""
        generator = Generator().manual_seed(0)
        draws = torch.multinomial(self.law, count * repeats, replacement=True, generator=generator).view(repeats, -1)
        laws = (torch.bincount(index, minlength=len(self.law)).to(self.law) / count for index in draws)
        return sum(map(self.divergence, laws)) / repeats


def target(law: Tensor, score: Tensor, kl: float = KL) -> Target:
    log_mass = law.log().flatten() + score.flatten() / kl
    return Target(log_mass.softmax(0), float(log_mass.logsumexp(0)))


@dataclass(frozen=True)
class Metrics:
    """How far weighted samples are from the target, each population by itself; populations of one sample together.

    tv and kl are distances to the target; "tv/iid" is the first over what equally many exact draws have on average, and
    "tv/iid(ESS)" over what as many exact draws have as the weights are worth.
    """

    target: Target
    score: Tensor

    def __call__(self, result: Result) -> Mapping[str, Measured]:
        weights, samples = result.weights.double(), result.samples
        reward = measured((weights * self.score[tuple(samples.unbind(-1))]).sum(-1))
        ess = result.ess[-1] / weights.shape[1]
        if weights.shape[1] == 1:
            weights, samples = weights.view(1, -1) / len(weights), samples.view(1, -1, samples.shape[-1])
        laws = [self.target.histogram(x, w) for x, w in zip(samples, weights, strict=True)]
        tv = torch.tensor([self.target.tv(law) for law in laws], dtype=torch.float64)
        worth = 1.0 / weights.square().sum(-1)
        floors = torch.tensor([self.target.tv_floor(float(n)) for n in worth], dtype=torch.float64)
        divergence = torch.tensor([self.target.divergence(law) for law in laws])
        count = weights.shape[1]
        return {
            "tv": measured(tv),
            "tv/iid": measured(tv / self.target.tv_floor(count)),
            "tv/iid(ESS)": measured(tv / floors),
            "kl": measured(divergence),
            "kl/iid": measured(divergence / self.target.divergence_floor(count)),
            "reward": reward,
            "exact log_z": Measured(self.target.log_z, 0.0),
            "ess": measured(ess),
        }


# ---- data


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
    """The E-scores of all words, with an axis of A, C, G, T for each letter. Both strands of a word have one score."""
    header, _, body = file.read_text().partition("\n")
    names, cells = header.split("\t"), body.split()
    if names[2:3] != ["E-score"] or len(cells) % len(names):
        raise ValueError(f"{file} is no table of 8-mers: its columns must be 8-mer, 8-mer, E-score, ...")
    ids = _letters("".join(cells[:: len(names)])).view(-1, len(cells[0]))
    scores = torch.from_numpy(np.array(cells[2 :: len(names)], dtype=np.float64))  # pyright: ignore[reportUnknownMemberType]
    table = torch.full([len(LETTERS)] * ids.shape[1], math.nan, dtype=torch.float64)
    for strand in (ids, reverse_complement(ids)):
        table[tuple(strand.unbind(-1))] = scores
    if table.isnan().any():
        raise ValueError(f"{file} lacks {int(table.isnan().sum())} of {table.numel()} words")
    return table


def _letters(text: str) -> Tensor:
    """The ids of a long text of letters."""
    codes = np.full(128, MASK)
    codes[list(LETTERS.encode())] = range(len(LETTERS))
    ids = torch.from_numpy(codes[np.frombuffer(text.encode("ascii", "replace"), dtype=np.uint8)])  # pyright: ignore[reportUnknownMemberType]
    if (ids == MASK).any():
        raise ValueError(f"DNA is made of {', '.join(LETTERS)}, got {text[int((ids == MASK).int().argmax())]}")
    return ids


def uniform(length: int = LENGTH) -> Tensor:
    """All words equally likely."""
    return torch.full([len(LETTERS)] * length, float(len(LETTERS)) ** -length, dtype=torch.float64)


def chain(weights: Tensor, pseudocount: float = 1.0) -> Tensor:
    """The Markov chain, with its own letters at each place, that is nearest to words with these weights (an axis for
    each letter): p(x) = p(x_1) · prod p(x_l+1 | x_l). `pseudocount` words of even letters leave none impossible."""
    length, size = weights.dim(), weights.shape[0]
    weights = weights + pseudocount / weights.numel()
    law = weights.sum(tuple(range(1, length)))
    law = law / law.sum()
    for place in range(1, length):
        pairs = weights.sum(tuple(k for k in range(length) if k not in (place - 1, place)))
        law = law.unsqueeze(-1) * (pairs / pairs.sum(-1, keepdim=True)).view(*[1] * (place - 1), size, size)
    return law


@cache
def fitted(names: tuple[Path, ...], bound: float = BOUND) -> Tensor:
    """A Markov chain of the words that some factor binds, each factor counted alike."""
    shares = [(score >= bound).double() / max(1, int((score >= bound).sum())) for score in map(read, names)]
    return chain(100.0 * torch.stack(shares).mean(0))


# ---- the task


def task(setup: Setup | None = None, fit: bool = False) -> Task:
    """Towards words that a factor binds, by its number among the names in order; from all words alike, or from those
    that some factor binds."""
    setup = Setup() if setup is None else setup
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
    law = fitted(tuple(known.values())) if fit else uniform()
    kl = KL if setup.kl is None else setup.kl
    aim = target(law, score, kl)
    return Task(
        FITTED if fit else NAME,
        f"words of {LENGTH} letters, towards those that {names[goal]} binds. The target has a perplexity of "
        f"{aim.perplexity:.0f} words and a mean reward of {float((aim.law * score.flatten()).sum()):.4f}",
        diffusion(law),
        tilt(law, score, kl),
        Metrics(aim, score),
        picture,
    )


fitted_task = partial(task, fit=True)
