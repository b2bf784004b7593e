"""What the two scorers of `emoji` learn from: features of a published network of ImageNet, mapped to the vectors of
captions.

A network that learns from a few thousand drawings alone ranks samples of a caption badly. A linear map of features that
were learned from a million photographs finds the captions of more drawings in styles and concepts that it was not
trained on. Such a map, the teacher, is trained by contrast on the drawings of three styles: a drawing belongs to its
own caption and not to those of others. It needs the published network, which is too large to ship, so a small network
is trained to give the same vectors for drawings, reconstructions and samples of the model (distillation, Hinton et al.,
2015). A sample counts with the vector that the teacher gives it, so it need not show its caption.

The two teachers share neither features nor styles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from tokensteer.core.steering.methods import pretrained
from tokensteer.tasks.common.augment import augmented
from tokensteer.tasks.common.learner import Learner
from tokensteer.tasks.common.metrics import in_parts
from tokensteer.tasks.common.task import weights_file
from tokensteer.tasks.common.tokenised_images import TokenisedImages, reconstructed
from tokensteer.tasks.emoji.data import TRAIN, Drawings
from tokensteer.tasks.emoji.model import GUIDANCE, NAME, reference
from tokensteer.tasks.emoji.sources import STYLES
from tokensteer.tasks.emoji.states import States
from tokensteer.tasks.nets import ImageText, ImageTextConfig, LinearConfig, load, save
from tokensteer.tasks.nets.image_text import as_image_text
from tokensteer.tasks.nets.store import build
from tokensteer.tasks.quality.features import INCEPTION, INCEPTION_SHA256, load_inception
from tokensteer.tasks.quality.imagenet import EFFICIENTNET, load_efficientnet
from tokensteer.tasks.quality.published import check_file, find_any, find_file
from tokensteer.train import Plan
from tokensteer.train.optim import half_precision

STYLES_OF = {"reward": ("noto", "flat", "twemoji"), "judge": ("blob", "3d", "emojione")}
FEATURES_OF = {"reward": "EfficientNet-Lite0", "judge": "Inception-v3"}
PLAN = Plan(1000, batch_size=512, rate=1e-3, warmup=0.05, weight_decay=0.1, average=0.99)
BLUR = 0.1
"""Noise on features in training, in their standard deviations."""
COPIES = 3
"""Places in which each drawing is seen."""
SAMPLES, STEPS = 20_000, 12
"""Samples of the model for each guidance, and the steps of each."""
GUIDANCES = (1.0, GUIDANCE)
ROWS = 256
TOGETHER = 1024  # captions that are drawn at once

Features = Callable[[Tensor], Tensor]
"""Numbers (P, F) of images (P, 3, H, W) of bytes."""


def check_published() -> None:
    """Raise FileNotFoundError, with the mend, if a published network is missing."""
    find_file(*EFFICIENTNET)
    find_file(*INCEPTION)


def published(part: str, device: torch.device | str) -> Features:
    """The features of a scorer's teacher, by a network of the data folder, which is loaded when it is first used."""

    def features(images: Tensor) -> Tensor:
        return _network(part, str(device))(images)

    return features


@cache
def _network(part: str, device: str) -> Features:
    on_gpu = torch.device(device).type == "cuda"
    if part == "judge":
        return load_inception(device=device, dtype=torch.float16 if on_gpu else torch.float32, rows=ROWS)
    net = load_efficientnet(device=device)

    def features(images: Tensor) -> Tensor:
        with half_precision(torch.device(device)):
            return net.features(images.to(device)).float()

    return lambda images: in_parts(features, images, ROWS)


@dataclass(frozen=True)
class Lessons:
    """Images (M, 3, H, W) of bytes with their features (M, F). The first of them are drawings in several places and
    their reconstructions, of these concepts (D,) and styles (D,); the others are samples."""

    images: Tensor
    features: Tensor
    concept: Tensor
    style: Tensor


@torch.no_grad()
def prepare(
    networks: TokenisedImages,
    drawings: Drawings,
    states: States,
    features: Features,
    generator: Generator,
    samples: int = SAMPLES,
    copies: int = COPIES,
) -> Lessons:
    """Lessons of the drawings to train on, in all styles, and of samples of their captions."""
    seen = drawings.part(TRAIN)
    places = [seen.pixels, *(augmented(seen.pixels, generator, may_turn=seen.mirrors) for _ in range(copies - 1))]
    drawn = torch.cat([*places, reconstructed(networks.tokeniser, seen.pixels)])
    times = len(drawn) // len(seen.pixels)
    captions = states.take((drawings.split == TRAIN).nonzero().squeeze(-1)).captions
    sampled = (part for guidance in GUIDANCES for part in _samples(networks, captions, guidance, samples, generator))
    images = torch.cat([drawn, *sampled])
    return Lessons(images, features(images), seen.concept.repeat(times), seen.style.repeat(times))


def _samples(
    networks: TokenisedImages, captions: Tensor, guidance: float, count: int, generator: Generator
) -> Iterator[Tensor]:
    """Samples of random captions (D, variants, length, width), as bytes."""
    while count > 0:
        some = min(count, TOGETHER)
        row, variant = (_draw(size, some, generator).to(captions.device) for size in captions.shape[:2])
        told = captions[row, variant].to(networks.device).float()
        model = reference(networks.model(told, STEPS), guidance)
        yield networks.pixels(pretrained(model)(1, some, generator=generator).samples[:, 0])
        count -= some


def _draw(size: int, count: int, generator: Generator) -> Tensor:
    return torch.randint(size, (count,), generator=generator, device=generator.device)


def learn(
    lessons: Lessons, vectors: Tensor, styles: Sequence[str], width: int, plan: Plan, generator: Generator
) -> ImageText:
    """A linear map of features to `width` numbers that finds captions, learned from the drawings of some styles.
    `vectors` (C, styles, variants, W) are those of all concepts. Captions name a style at random, so that concepts are
    compared in any."""
    wanted = torch.tensor([list(STYLES).index(name) for name in styles], device=lessons.style.device)
    own = torch.isin(lessons.style, wanted).nonzero().squeeze(-1)  # samples come behind, and have no style
    inputs, concept = lessons.features[own].float(), lessons.concept[own]
    config = ImageTextConfig("linear", asdict(LinearConfig(inputs.shape[-1], width)), vectors.shape[-1])
    net = as_image_text(build(config).to(inputs.device))
    learner, spread = Learner(net, plan), BLUR * inputs.std(0)
    size = plan.batch_size
    for k in range(plan.steps):
        index = _draw(len(own), size, generator)
        style, variant = (_draw(count, size, generator) for count in vectors.shape[1:3])
        noise = torch.randn(size, len(spread), generator=generator, device=generator.device)
        told = vectors[concept[index], style, variant].float()
        seen = net.of_images(inputs[index] + spread * noise)
        torch.autograd.backward(contrast(seen, net.of_texts(told), net.scale, concept[index]))
        learner.learn(plan.rate_at(k / plan.steps))
    return as_image_text(learner.average.requires_grad_(False))


def contrast(images: Tensor, texts: Tensor, scale: Tensor, concept: Tensor) -> Tensor:
    """The mean of -log p(own text | image) and -log p(own image | text) in the batch. Others of the same concept are no
    mistake and do not count."""
    logits = scale * images @ texts.mT
    same = (concept[:, None] == concept) & ~torch.eye(len(concept), dtype=torch.bool, device=concept.device)
    logits = logits.masked_fill(same, -torch.inf)
    own = torch.arange(len(logits), device=logits.device)
    return 0.5 * (F.cross_entropy(logits, own) + F.cross_entropy(logits.mT, own))


@dataclass(frozen=True, eq=False)
class Teacher:
    """A map of captions and of the features of images."""

    net: ImageText
    features: Features

    def __call__(self, pixels: Tensor, vectors: Tensor) -> Tensor:
        """The cosines (P,) of images of bytes and sentence vectors (P, W)."""
        with torch.no_grad():
            return self.net(self.features(pixels), vectors)


def file_of(folder: Path, part: str) -> Path:
    return weights_file(folder, NAME, f"{part}-teacher")


def store(net: ImageText, folder: Path, part: str, device: torch.device | str) -> ImageText:
    """Write the map of a teacher, and read it as it was written."""
    save(net, file_of(folder, part), torch.int8)
    return load_teacher(folder, part, device)


def load_teacher(folder: Path, part: str, device: torch.device | str) -> ImageText:
    return as_image_text(load(file_of(folder, part), device))


def find_judge(folder: Path, device: torch.device | str) -> Teacher | None:
    """The teacher of the judge, if its map and the file of Inception are there. Raises if one of them is damaged."""
    file, inception = file_of(folder, "judge"), find_any(INCEPTION[0])
    if not file.is_file() or inception is None:
        return None
    check_file(inception, INCEPTION_SHA256)
    return Teacher(load_teacher(folder, "judge", device), published("judge", device))
