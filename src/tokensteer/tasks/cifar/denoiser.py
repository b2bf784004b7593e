"""The denoiser of `cifar`: a masked transformer over the tokens of images, given a class or none."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Generator, Tensor, nn

from tokensteer.tasks.cifar.data import CLASSES, Images
from tokensteer.tasks.common import grid_denoiser
from tokensteer.tasks.common.grid_denoiser import DROPPED, GridTraining, encoded
from tokensteer.tasks.common.image_tokeniser import CONFIG as AUTOENCODER
from tokensteer.tasks.nets import FSQ, GridTransformer, GridTransformerConfig
from tokensteer.train import Plan

TOKENISER = replace(AUTOENCODER, levels=(8, 6, 5))
NOISE = 0.25
"""Fewer codes than the usual thousand, and up to a quarter of them replaced in training: tokens are easier to predict,
at some cost in reconstruction (docs/cifar.md)."""
MASK = TOKENISER.num_codes
CONFIG = GridTransformerConfig(
    MASK + 1,
    TOKENISER.grid,
    TOKENISER.grid,
    hidden=320,
    depth=11,
    heads=5,
    num_classes=len(CLASSES),
    skips=True,
    coarse=7,
)
PLAN = Plan(60_000, batch_size=256, rate=1e-3, warmup=0.02, weight_decay=0.03, average=0.9995)


def tokens(tokeniser: FSQ, images: Images, mirrored: bool) -> tuple[Tensor, Tensor]:
    """Ids (D, L) as int16 and labels (D,) of images, followed by those of their mirror images if `mirrored`."""
    pixels = [images.pixels, images.pixels.flip(-1)] if mirrored else [images.pixels]
    return torch.cat([encoded(tokeniser, some) for some in pixels]), images.labels.repeat(len(pixels))


class DenoiserTraining(GridTraining):
    """Steps on the tokens of `images`; `unseen` ones are for checks."""

    def __init__(
        self,
        net: GridTransformer,
        tokeniser: FSQ,
        images: Images,
        unseen: Images,
        plan: Plan = PLAN,
        compiled: bool = False,
    ) -> None:
        super().__init__(net, tokeniser, plan, compiled)
        self.no_class = net.config.num_classes
        self.ids, self.labels = tokens(tokeniser, images, mirrored=True)
        self.unseen = tokens(tokeniser, unseen, mirrored=False)

    def batch(self, generator: Generator) -> tuple[Tensor, Tensor]:
        index = torch.randint(len(self.ids), (self.batch_size,), generator=generator, device=self.device)
        dropped = torch.rand(len(index), generator=generator, device=self.device) < DROPPED
        return self.ids[index].long(), torch.where(dropped, self.no_class, self.labels[index])

    def check(self) -> dict[str, float]:
        return measure(self.learner.average, *self.unseen, self.mask)


def measure(net: nn.Module, ids: Tensor, labels: Tensor, mask: int) -> dict[str, float]:
    """Nats per masked site with the class and without."""
    return grid_denoiser.measure(net, ids, labels, mask, ("unseen", "unseen without class"))
