"""What the task `text` is made of: its rewards, canvases for prompts, the sampler and the target.

A reward is log p(y | x) of a small encoder for one of two classes y. The judge of the same classes is a detector of
n-grams that learned from other texts or labels, and by which nothing is steered. A prompt is the beginning of a text,
or a text with blanks `___` or `___7`; all other sites are masked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from tokensteer.core.kernels.ranked import LeftToRight
from tokensteer.core.models.denoiser import Denoiser, from_hidden
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.template import template
from tokensteer.core.proposals.amortised import OtherHead
from tokensteer.core.twists.ramps import Ramp, clipped
from tokensteer.core.twists.ramps import linear as linear_ramp
from tokensteer.core.twists.tilt import Tilt
from tokensteer.rewards.text import OfText
from tokensteer.tasks.common.task import Setup
from tokensteer.tasks.common.wordpiece import WordPiece
from tokensteer.tasks.nets import Encoder, Reader, Transformer, Trunk, load

NAME = "text"
CLASSES = ("blame", "praise")
BLANK = re.compile(r"_{3,}(\d*)")
HANDFUL = 5  # sites of a blank without a number
KL, DRAWS, NUM_STEPS = 0.1, 4, 50
TEMPERATURE = 0.95
"""Logits of the denoiser are divided by it."""


@dataclass(frozen=True)
class Reading:
    """A reward of the task: the names of the weights of its network and of the judge's, what both tell apart, the kl,
    the ramp, and the clip of its gradient if it needs another than the methods'."""

    reward: str
    judge: str
    classes: tuple[str, str]
    kl: float = KL
    ramp: Ramp = linear_ramp
    clip: float | None = None


READINGS = {
    "sentiment": Reading("reward", "judge", CLASSES),
    # A rude word has a log-probability of about -10, which a smaller clip does not make up for.
    "toxicity": Reading("toxicity", "toxicity-judge", ("polite", "toxic"), 0.05, clipped(3), clip=30.0),
}
"""The rewards by name, the default one first."""


def vocabulary_file(folder: Path) -> Path:
    return folder / f"{NAME}-vocab.txt"


def canvas(prompt: str, vocabulary: WordPiece, length: int) -> Tensor:
    """The tokens of a prompt, with masks at its blanks and after its end, (length,)."""
    tokens: list[int] = []
    sites: list[int] = []
    site = start = 0
    for blank in (*BLANK.finditer(prompt), None):
        ids = vocabulary.encode(prompt[start : len(prompt) if blank is None else blank.start()])
        tokens += ids
        sites += range(site, site + len(ids))
        site += len(ids)
        if blank is not None:
            start, site = blank.end(), site + int(blank[1] or HANDFUL)
    if site > length or len(tokens) == length:
        short = prompt if len(prompt) <= 40 else f"{prompt[:37]}..."
        raise ValueError(f"the prompt {short!r} takes {site} of {length} sites, all there are: shorten it")
    return template(length, vocabulary.mask_id, tokens, at=sites)


def as_denoiser(mask_id: int) -> Callable[[nn.Module], Denoiser]:
    """Makes a network a denoiser whose head is computed only at the sites that need it."""

    def wrap(net: nn.Module) -> Denoiser:
        assert isinstance(net, Encoder)
        return from_hidden(Trunk(cast("Transformer", net)), net.head, mask_id, ignores_time=True)

    return wrap


def sharpened(denoiser: Encoder, temperature: float = TEMPERATURE) -> Encoder:
    """The same denoiser with its logits divided by a temperature."""
    net = deepcopy(denoiser)
    with torch.no_grad():
        for part in (net.norm.weight, net.norm.bias, net.head.bias):
            part.div_(temperature)
    return net


def with_change(denoiser: Encoder, units: int) -> Encoder:
    """The same denoiser with a change of its hidden states that can learn, nothing at first."""
    net = Encoder(replace(denoiser.config, change=units)).to(denoiser.places.device)
    net.load_state_dict(denoiser.state_dict(), strict=False)
    return net.eval()


def as_head(net: nn.Module) -> OtherHead:
    """The change of a stored proposal as a head on the hidden states of the task's denoiser."""
    assert isinstance(net, Encoder)
    return OtherHead(sharpened(net).head, net.change)


def load_denoiser(file: Path, device: str) -> Encoder:
    """The stored denoiser at the temperature of the task."""
    return sharpened(cast("Encoder", load(file, device)))


def model(setup: Setup, net: nn.Module, canvases: Sequence[Tensor], mask_id: int) -> Diffusion:
    """The denoiser as a sampler on canvases (L,), with equally many populations each: from left to right, or with
    remasking in random order."""
    canvas = canvases[0] if len(canvases) == 1 else torch.stack(list(canvases))
    found = setup.diffusion(as_denoiser(mask_id)(net), mask_id, canvas, NUM_STEPS)
    return found if setup.remask else replace(found, kernel=LeftToRight(mask_id))


@dataclass(frozen=True, eq=False)
class Opinion:
    """log p(goal | x), (P,), of ids (P, L), one-hots (P, L, V), or embeddings of the reader's own table."""

    reader: Reader
    goal: int

    @property
    def embedding(self) -> Tensor:
        return self.reader.embedding

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        return self.reader.of_embeddings(embedded)[:, self.goal]

    def __call__(self, x: Tensor) -> Tensor:
        return self.reader(x)[:, self.goal]


def tilt(reward: Opinion | OfText, kl: float = KL, ramp: Ramp = linear_ramp, draws: int = DRAWS) -> Tilt:
    """The target p(x) · exp(reward/kl), for an opinion p(x) · p(goal | x)^(1/kl)."""
    # Averages over steps are not measured here: a token that is opened can turn a text.
    return Tilt(reward, kl, ramp, draws, differentiable=isinstance(reward, Opinion), smoothing=0.0)
