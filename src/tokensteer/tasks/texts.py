"""Short texts in pieces of words: a denoiser of reviews, two classifiers of what their writers thought, and canvases.

The reward is log p(y | x) of a transformer for y = 1, praise, or y = 0, blame; a detector of n-grams that learned from
other reviews, and which nothing was steered by, judges the samples. A prompt is the beginning of a text or a text with
blanks, `___` or `___7`; whatever it does not say is free.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Generator, Tensor, nn

from tokensteer.core.denoiser import Denoiser, from_hidden
from tokensteer.core.model import Diffusion, template
from tokensteer.core.schedule import linear_ramp, uniform_steps
from tokensteer.core.twist import Tilt
from tokensteer.nets import (
    AttentiveConfig,
    AttentiveReader,
    NgramConfig,
    NgramReader,
    Transformer,
    TransformerConfig,
    Trunk,
)
from tokensteer.nets import load as load_net
from tokensteer.tasks import learned
from tokensteer.tasks.task import Setup
from tokensteer.tasks.text_data import Reviews
from tokensteer.tasks.wordpiece import WordPiece
from tokensteer.train import Plan

ROLES = ("denoiser", "reward", "judge")
CLASSES = ("blame", "praise")
BLANK = re.compile(r"_{3,}(\d*)")
HANDFUL = 5
"""Sites of a blank that does not say how many."""
KL, DRAWS, NUM_STEPS = 0.2, 4, 64


@dataclass(frozen=True)
class Recipe:
    """All that tells one of these tasks from another: its texts, its networks, how they are trained.

    Classifiers see windows with a share `dropped` of their tokens masked and a share `swapped` taken from another
    window: what steering finds must please them as a text, not by one word.
    """

    name: str
    data: Callable[[], Reviews]
    denoiser: TransformerConfig
    reward: AttentiveConfig
    judge: NgramConfig
    plans: tuple[Plan, Plan, Plan]
    course: learned.Course
    dropped: float
    swapped: float
    source: str

    @property
    def length(self) -> int:
        return self.denoiser.length


def file_of(recipe: Recipe, role: str, folder: Path) -> Path:
    return folder / f"{recipe.name}-{role}.safetensors"


def vocabulary_of(recipe: Recipe, folder: Path) -> Path:
    return folder / f"{recipe.name}-vocab.txt"


# ---- canvases


def canvas(prompt: str, vocabulary: WordPiece, length: int) -> Tensor:
    """The prompt's tokens and masks where it is blank and behind it, (length,)."""
    tokens: list[int] = []
    sites: list[int] = []
    site, blanks = 0, [*BLANK.finditer(prompt), None]
    start = 0
    for blank in blanks:
        ids = vocabulary.encode(prompt[start : len(prompt) if blank is None else blank.start()])
        tokens += ids
        sites += range(site, site + len(ids))
        site += len(ids)
        if blank is not None:
            start, site = blank.end(), site + int(blank[1] or HANDFUL)
    if site > length or len(tokens) == length:
        raise ValueError(f"the prompt {_shortened(prompt)} takes {site} of {length} sites, all there are: shorten it")
    return template(length, vocabulary.mask_id, tokens, at=sites)


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


# ---- the model and what is asked of it


def as_denoiser(mask_id: int) -> Callable[[nn.Module], Denoiser]:
    """How a transformer is used as a denoiser: its head answers only where tokens are asked for."""

    def wrap(net: nn.Module) -> Denoiser:
        assert isinstance(net, Transformer)
        return from_hidden(Trunk(net), net.head, mask_id, ignores_time=True)

    return wrap


def model(recipe: Recipe, setup: Setup, canvases: Sequence[Tensor], mask_id: int) -> Diffusion:
    """The trained denoiser as a sampler on canvases (L,), populations for each of them."""
    net = load_net(file_of(recipe, "denoiser", setup.weights), setup.device)
    stacked = torch.stack(list(canvases)).to(setup.device)
    return Diffusion(
        as_denoiser(mask_id)(net),
        setup.kernel(mask_id),
        uniform_steps(setup.num_steps),
        stacked[0] if len(stacked) == 1 else stacked,
    )


def reader(recipe: Recipe, role: str, setup: Setup) -> AttentiveReader | NgramReader:
    """Of texts (P, L), log-probabilities of blame and praise; `role` is reward or judge."""
    return cast("AttentiveReader | NgramReader", load_net(file_of(recipe, role, setup.weights), setup.device))


@dataclass(frozen=True, eq=False)
class Opinion:
    """log p(goal | x), (P,), of ids (P, L), one-hots (P, L, V), or tokens embedded by the reader's own table."""

    reader: AttentiveReader | NgramReader
    goal: int

    def __post_init__(self) -> None:
        if not 0 <= self.goal < len(CLASSES):
            raise ValueError(f"the goal must be 1, for praise, or 0, for blame, got {self.goal}")

    @property
    def embedding(self) -> Tensor:
        return self.reader.embedding

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        return self.reader.of_embeddings(embedded)[:, self.goal]

    def __call__(self, x: Tensor) -> Tensor:
        return self.reader(x)[:, self.goal]


def tilt(reward: Opinion, kl: float | None = None, draws: int = DRAWS) -> Tilt:
    """The target p(x) · p(goal | x)^(1/kl)."""
    return Tilt(reward, KL if kl is None else kl, linear_ramp, draws, differentiable=True)


# ---- texts made harder


def augment(mask_id: int, dropped: float, swapped: float) -> Callable[[Tensor, Generator], Tensor]:
    """Take a share `swapped` of the tokens (P, L) from other rows of the batch, and mask a share `dropped`."""

    def harder(ids: Tensor, generator: Generator) -> Tensor:
        u = torch.rand(ids.shape, generator=generator, device=ids.device)
        other = ids[torch.randperm(len(ids), generator=generator, device=ids.device)]
        return torch.where(u < dropped, mask_id, torch.where(u < dropped + swapped, other, ids))

    return harder
