"""Training of the two scorers of `emoji`, by contrast: an image belongs to its caption and not to those of others.

The reward, a residual network, learns from three styles; the judge, a mixer of patches, from the other three. They
share neither drawings nor architecture. Captions name a style at random, so that a scorer learns to compare concepts in
any style. Half of the images are reconstructions of the tokeniser, since samples are decoded by it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tokensteer.tasks.common.augment import distorted
from tokensteer.tasks.common.learner import Learner
from tokensteer.tasks.common.metrics import in_parts
from tokensteer.tasks.common.timed_loop import Compiled, Trainee
from tokensteer.tasks.common.tokenised_images import reconstructed
from tokensteer.tasks.emoji.data import CONCEPT, PAIR, TRAIN, Drawings
from tokensteer.tasks.emoji.render import SIDE
from tokensteer.tasks.nets import FSQ, ImageText, ImageTextConfig, MixerConfig, ResNetConfig
from tokensteer.tasks.nets.parts import channels_last
from tokensteer.train import Plan
from tokensteer.train.optim import half_precision

STYLES_OF = {"reward": ("noto", "flat", "twemoji"), "judge": ("blob", "3d", "emojione")}
VECTOR = 128
REWARD = ImageTextConfig("resnet", asdict(ResNetConfig(SIDE, VECTOR, channels=(32, 64, 96, 128), blocks=1)))
JUDGE = ImageTextConfig("mixer", asdict(MixerConfig(SIDE, VECTOR, hidden=192, depth=8, kernel=7, patch=4)))
PLAN = Plan(8_000, batch_size=512, rate=2e-3, warmup=0.1, weight_decay=0.1, average=0.998)
CANDIDATES = 200
"""Captions among which an image must find its own."""
ROWS = 500


class TowerTraining(Trainee):
    """Steps on the drawings of three styles. `vectors` (C, styles, variants, W) are those of all captions."""

    def __init__(
        self,
        net: ImageText,
        drawings: Drawings,
        vectors: Tensor,
        part: str,
        plan: Plan = PLAN,
        tokeniser: FSQ | None = None,
        compiled: bool = False,
    ) -> None:
        self.device, self.batch_size = next(net.parameters()).device, plan.batch_size
        own = drawings.part(TRAIN).styles(*STYLES_OF[part])
        self.images = own.pixels if tokeniser is None else torch.cat([own.pixels, reconstructed(tokeniser, own.pixels)])
        times = len(self.images) // len(own.pixels)
        self.concept, self.mirrors = own.concept.repeat(times), own.mirrors.repeat(times)
        self.drawings, self.vectors = drawings, vectors.to(self.device)
        net = channels_last(net)
        self.learner = Learner(net, plan)
        self.learners = {part: self.learner}
        self.net, self.of_images = net, Compiled(net.of_images, compiled)
        self.compiled = (self.of_images,) if compiled else ()
        self.given = {"config": asdict(net.config), "batch size": plan.batch_size, "images": len(self.images)}

    def step(self, rate: float, done: float, generator: Generator) -> dict[str, Tensor]:
        def draw(count: int) -> Tensor:
            return torch.randint(count, (self.batch_size,), generator=generator, device=self.device)

        index = draw(len(self.images))
        images = distorted(self.images[index].float() / 255, generator, self.mirrors[index])
        concept = self.concept[index]
        vectors = self.vectors[concept, draw(self.vectors.shape[1]), draw(self.vectors.shape[2])].float()
        with half_precision(self.device):
            seen = self.of_images(images.contiguous(memory_format=torch.channels_last))
        loss = contrast(seen.float(), self.net.of_texts(vectors), self.net.scale, concept)
        torch.autograd.backward(loss)
        self.learner.learn(rate)
        return {"loss": loss}

    def check(self) -> dict[str, float]:
        net = self.learner.average
        assert isinstance(net, ImageText)
        return measure(net, self.drawings, self.vectors)


def contrast(images: Tensor, texts: Tensor, scale: Tensor, concept: Tensor) -> Tensor:
    """The mean of -log p(own text | image) and -log p(own image | text) in the batch. Others of the same concept are no
    mistake and do not count."""
    logits = scale * images @ texts.mT
    same = (concept[:, None] == concept) & ~torch.eye(len(concept), dtype=torch.bool, device=concept.device)
    logits = logits.masked_fill(same, -torch.inf)
    own = torch.arange(len(logits), device=logits.device)
    return 0.5 * (F.cross_entropy(logits, own) + F.cross_entropy(logits.mT, own))


def measure(net: ImageText, drawings: Drawings, vectors: Tensor, tokeniser: FSQ | None = None) -> dict[str, float]:
    """R@1 among `CANDIDATES` captions for unseen pairs and unseen concepts, of drawings or of their reconstructions."""
    names, found = {"unseen pairs": PAIR, "unseen concepts": CONCEPT}, dict[str, float]()
    for name, split in names.items():
        some = one_of_each(drawings.part(split))
        pixels = some.pixels if tokeniser is None else reconstructed(tokeniser, some.pixels)
        if len(pixels) > 1:
            found[f"R@1, {name}"] = retrieval(net, pixels, whole_captions(some, vectors))
    return found


def one_of_each(drawings: Drawings, most: int = CANDIDATES) -> Drawings:
    """At most so many drawings of different concepts, the styles in turn."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, concept in enumerate(drawings.concept.cpu()):
        places[int(concept)].append(place)
    one = [drawn[turn % len(drawn)] for turn, drawn in enumerate(places.values())]
    chosen = torch.linspace(0, max(0, len(one) - 1), min(most, len(one))).long()
    return drawings.take(torch.tensor(one, dtype=torch.long)[chosen].to(drawings.concept.device))


def whole_captions(drawings: Drawings, vectors: Tensor) -> Tensor:
    """The sentence vectors (D, W) of the whole captions."""
    return vectors[drawings.concept.to(vectors.device), drawings.style.to(vectors.device), 0].float()


@torch.no_grad()
def retrieval(net: ImageText, pixels: Tensor, vectors: Tensor) -> float:
    """The share of images (P, 3, H, W) of bytes whose best text (P, W) is their own."""

    def of_images(part: Tensor) -> Tensor:
        return net.of_images(part.float() / 255)

    seen = in_parts(of_images, pixels, ROWS)
    best = (seen @ net.of_texts(vectors.to(seen.device)).mT).argmax(-1)
    return float((best == torch.arange(len(best), device=best.device)).double().mean())


def as_image_text(net: nn.Module) -> ImageText:
    if not isinstance(net, ImageText):
        raise ValueError(f"{type(net).__name__} compares no images with texts: train the reward and the judge again")
    return net
