"""Training of the two scorers of `emoji`: small networks that give images the vectors of their teachers.

The reward is a residual network, the judge a mixer of patches. Their teachers share neither features nor styles
(`teachers`). A scorer has its teacher's map of captions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict

import torch
from torch import Generator, Tensor

from tokensteer.tasks.common.learner import Learner
from tokensteer.tasks.common.metrics import in_parts
from tokensteer.tasks.common.timed_loop import Compiled, Trainee
from tokensteer.tasks.common.tokenised_images import reconstructed
from tokensteer.tasks.emoji.data import CONCEPT, PAIR, Drawings
from tokensteer.tasks.emoji.render import SIDE
from tokensteer.tasks.emoji.teachers import Lessons, Teacher
from tokensteer.tasks.nets import FSQ, ImageText, ImageTextConfig, MixerConfig, ResNetConfig
from tokensteer.tasks.nets.parts import channels_last
from tokensteer.train import Plan
from tokensteer.train.frozen import fingerprint
from tokensteer.train.optim import half_precision

VECTOR = 128
REWARD = ImageTextConfig("resnet", asdict(ResNetConfig(SIDE, VECTOR, channels=(32, 80, 144, 208), blocks=1)))
JUDGE = ImageTextConfig("mixer", asdict(MixerConfig(SIDE, VECTOR, hidden=192, depth=8, kernel=7, patch=4)))
PLAN = Plan(8_000, batch_size=512, rate=2e-3, warmup=0.1, weight_decay=0.05, average=0.998)
CANDIDATES = 200
"""Captions among which an image must find its own."""
ROWS = 500


class TowerTraining(Trainee):
    """Steps towards the vectors of a teacher. `vectors` (C, styles, variants, W) are those of all captions."""

    def __init__(
        self,
        net: ImageText,
        teacher: ImageText,
        lessons: Lessons,
        drawings: Drawings,
        vectors: Tensor,
        part: str,
        plan: Plan = PLAN,
        compiled: bool = False,
    ) -> None:
        self.device, self.batch_size = next(net.parameters()).device, plan.batch_size
        self.images = lessons.images.to(self.device)
        self.wanted = in_parts(lambda features: teacher.of_images(features.float()), lessons.features)
        self.drawings, self.vectors = drawings, vectors.to(self.device)
        net = channels_last(net)
        net.text.load_state_dict(teacher.text.state_dict())
        net.text.requires_grad_(False)
        net.log_scale.data.copy_(teacher.log_scale)
        net.log_scale.requires_grad_(False)
        self.learner = Learner(net, plan)
        self.learners = {part: self.learner}
        self.net, self.of_images = net, Compiled(net.of_images, compiled)
        self.compiled = (self.of_images,) if compiled else ()
        taught = fingerprint(teacher.parameters())
        self.given = {
            "config": asdict(net.config),
            "batch size": plan.batch_size,
            "images": len(self.images),
            "teacher": taught,
        }

    def step(self, rate: float, done: float, generator: Generator) -> dict[str, Tensor]:
        index = torch.randint(len(self.images), (self.batch_size,), generator=generator, device=self.device)
        images = self.images[index].float() / 255
        with half_precision(self.device):
            seen = self.of_images(images.contiguous(memory_format=torch.channels_last))
        loss = 1 - (seen.float() * self.wanted[index]).sum(-1).mean()
        torch.autograd.backward(loss)
        self.learner.learn(rate)
        return {"loss": loss}

    def check(self) -> dict[str, float]:
        net = self.learner.average
        assert isinstance(net, ImageText)
        return measure(net, self.drawings, self.vectors)


SPLITS = {"unseen pairs": PAIR, "unseen concepts": CONCEPT}


def measure(net: ImageText, drawings: Drawings, vectors: Tensor, tokeniser: FSQ | None = None) -> dict[str, float]:
    """R@1 among `CANDIDATES` captions for unseen pairs and unseen concepts, of drawings or of their reconstructions."""
    found: dict[str, float] = {}
    for name, some in _held_out(drawings):
        pixels = some.pixels if tokeniser is None else reconstructed(tokeniser, some.pixels)
        found[f"R@1, {name}"] = retrieval(net, pixels, whole_captions(some, vectors))
    return found


def measure_teacher(teacher: Teacher, drawings: Drawings, vectors: Tensor) -> dict[str, float]:
    """R@1 of a teacher, as that of `measure`."""
    found: dict[str, float] = {}
    for name, some in _held_out(drawings):
        seen = in_parts(teacher.net.of_images, teacher.features(some.pixels))
        found[f"R@1, {name}"] = share_found(seen, teacher.net, whole_captions(some, vectors))
    return found


def likeness(teacher: Teacher, net: ImageText, drawings: Drawings) -> dict[str, float]:
    """The mean cosine of a network's vectors of drawings with those of its teacher."""
    found: dict[str, float] = {}
    for name, some in _held_out(drawings):
        wanted = in_parts(teacher.net.of_images, teacher.features(some.pixels))
        own = in_parts(lambda part: net.of_images(part.float() / 255), some.pixels, ROWS)
        found[f"cosine with the teacher, {name}"] = float((wanted * own).sum(-1).mean())
    return found


def _held_out(drawings: Drawings) -> Iterator[tuple[str, Drawings]]:
    """Those of `CANDIDATES` concepts of each split that has more than one."""
    for name, split in SPLITS.items():
        some = one_of_each(drawings.part(split))
        if len(some.pixels) > 1:
            yield name, some


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


def retrieval(net: ImageText, pixels: Tensor, vectors: Tensor) -> float:
    """The share of images (P, 3, H, W) of bytes whose best text (P, W) is their own."""

    def of_images(part: Tensor) -> Tensor:
        return net.of_images(part.float() / 255)

    return share_found(in_parts(of_images, pixels, ROWS), net, vectors)


@torch.no_grad()
def share_found(seen: Tensor, net: ImageText, vectors: Tensor) -> float:
    """The share of vectors (P, D) of images whose best text (P, W) is their own."""
    best = (seen @ net.of_texts(vectors.to(seen.device)).mT).argmax(-1)
    return float((best == torch.arange(len(best), device=best.device)).double().mean())
