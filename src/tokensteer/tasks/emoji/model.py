"""The networks of the task `emoji` as models: samplers of tokens given a caption, guided ones, and their target.

A population has a caption: its states are the context of a `Diffusion`, (B, tokens, width), and zeros are no caption.
The reference is the guided sampler, as Meissonic samples; rewards tilt it. The product target p(x | c)^a · p(x)^(1 - a)
is for cfg and smc-cfg.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tokensteer.core.models.denoiser import Denoiser, from_logits
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.guided_reference import guided_reference, product_network
from tokensteer.core.models.product import Product, guided
from tokensteer.tasks.common.task import Setup
from tokensteer.tasks.common.tokenised_images import TokenisedImages, as_tokenised, load_roles
from tokensteer.tasks.emoji import states
from tokensteer.tasks.emoji.states import CaptionEncoder
from tokensteer.tasks.nets import GridTransformer, ImageText
from tokensteer.tasks.nets.image_text import as_image_text
from tokensteer.train.optim import half_precision

NAME = states.NAME
STEPS = 24
GUIDANCE = 3.0
ROLES = ("tokeniser", "denoiser", "reward", "judge", states.ENCODER)
MINUTES = 25


@dataclass(frozen=True, eq=False)
class Networks(TokenisedImages):
    """All networks of the task."""

    reward: ImageText
    judge: ImageText
    encoder: CaptionEncoder

    def __post_init__(self) -> None:
        super().__post_init__()
        read, written = self.denoiser.config, self.encoder.net.config
        if (read.context_length, read.context_width) != (written.length, written.width):
            raise ValueError(
                f"the encoder gives {written.length} states of {written.width} numbers, and the denoiser reads "
                f"{read.context_length} of {read.context_width}: train the denoiser with this encoder"
            )

    def states(self, captions: Sequence[str]) -> Tensor:
        """The states of captions, (B, tokens, width)."""
        return self.encoder(list(captions))


def load_networks(setup: Setup) -> Networks:
    """The networks of a folder. Raises FileNotFoundError with the mend if one is not there."""
    tokeniser, denoiser, reward, judge, encoder = load_roles(setup, NAME, ROLES, MINUTES)
    first = as_tokenised(NAME, setup.weights, tokeniser, denoiser)
    return Networks(*first, as_image_text(reward), as_image_text(judge), states.with_vocabulary(encoder, setup.weights))


def without_caption(conditional: Diffusion) -> Diffusion:
    """p(x), from the same network."""
    return replace(conditional, context=torch.zeros_like(conditional.conditions[0][:1]))


def reference(conditional: Diffusion, guidance: float) -> Diffusion:
    """The guided sampler as a model: each prediction is the normalised product of that with the caption and that
    without. Its samples have no weights, and its distribution is not the product of the two models."""
    return guided_reference(conditional, without_caption(conditional), guidance)


def product(conditional: Diffusion, guidance: float) -> Product:
    """p(x | caption)^a · p(x)^(1 - a), as a target with weights."""
    return guided(conditional, without_caption(conditional), guidance)


def as_guided(guidance: float) -> Callable[[nn.Module], Denoiser]:
    """Makes a network a denoiser of the guided prediction, of the contexts of `reference`."""

    def wrap(net: nn.Module) -> Denoiser:
        grid = as_grid(net)

        def logits(x: Tensor, states: Tensor) -> Tensor:
            with half_precision(x.device):
                return grid(x, states).float()

        both = product_network(logits, logits, 1, (guidance, 1.0 - guidance), timed=False)
        return from_logits(logits if guidance == 1 else both, grid.config.vocab_size - 1, ignores_time=True)

    return wrap


def as_grid(net: nn.Module) -> GridTransformer:
    if not isinstance(net, GridTransformer):
        raise ValueError(f"{type(net).__name__} is no denoiser of {NAME}: train it again")
    return net
