"""What is measured of images of `cifar`: FID, KID, precision and recall, class accuracy, Inception-like scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from tokensteer import tensorfile
from tokensteer.app.words.numbers import stored
from tokensteer.tasks.cifar.data import Data
from tokensteer.tasks.cifar.model import Networks
from tokensteer.tasks.common.metrics import Classifier
from tokensteer.tasks.quality.classes import class_accuracy, class_score
from tokensteer.tasks.quality.extrapolate import extrapolate
from tokensteer.tasks.quality.frechet import Frechet
from tokensteer.tasks.quality.kernel_distance import kid
from tokensteer.tasks.quality.manifold import precision_recall
from tokensteer.tasks.quality.moments import Moments

KEPT = 10_000  # features that are kept, of the reference and of samples, for all but FID itself
PART = 500  # images at a time

Batch = tuple[Tensor, Tensor]
"""Images (P, 3, H, W) of bytes and their labels (P,)."""


@dataclass(frozen=True, eq=False)
class Reference:
    """The moments of all training images, and features of some of them in random order."""

    distance: Frechet
    features: Tensor


@dataclass(frozen=True, eq=False)
class Instruments:
    """What measures: features of images, class probabilities for an Inception-like score if they are there, and our
    own judge."""

    features: Callable[[Tensor], Tensor]
    scores: Classifier | None
    networks: Networks
    reference: Reference
    least: int = 5000
    """FID is taken to be a line in 1/n from so many images on, and extrapolated where twice as many are kept."""

    def __call__(self, batches: Iterable[Batch]) -> dict[str, Any]:
        """Measure images that come in batches, none of which is kept."""
        moments: Moments | None = None
        kept: list[Tensor] = []
        judged: list[Tensor] = []
        scored: list[Tensor] = []
        labels: list[Tensor] = []
        for images, wanted in parts_of(batches):
            found = self.features(images)
            moments = Moments.of(found) if moments is None else moments + Moments.of(found)
            if sum(map(len, kept)) < KEPT:
                kept.append(found)
            judged.append(self.networks.judge(images.float() / 255))
            labels.append(wanted)
            if self.scores is not None:
                scored.append(self.scores(images))
        if moments is None:
            raise ValueError("there are no images to measure")
        return self._numbers(moments, torch.cat(kept)[:KEPT], torch.cat(judged), torch.cat(labels), scored)

    def _numbers(
        self, moments: Moments, features: Tensor, log_p: Tensor, labels: Tensor, scored: list[Tensor]
    ) -> dict[str, Any]:
        generator = Generator().manual_seed(0)
        near = precision_recall(features, self.reference.features, generator=generator)
        parts = min(10, len(labels))
        found = {
            "accuracy": class_accuracy(log_p, labels),
            "judge score": class_score(log_p, parts),
            "kid": kid(features, self.reference.features, generator=generator),
            "precision": near.precision,
            "recall": near.recall,
        }
        if scored:
            found["score"] = class_score(torch.cat(scored), parts)
        if len(features) >= 2 * self.least:
            distance = self.reference.distance.of
            line = extrapolate(distance, features, least=self.least, points=5, generator=generator)
            found["extrapolated fid"] = line.intercept
        numbers = {name: stored(value) for name, value in found.items()}
        return {"images": moments.count, "fid": self.reference.distance(moments).value, **numbers}


def parts_of(batches: Iterable[Batch], rows: int = PART) -> Iterator[Batch]:
    for images, labels in batches:
        yield from zip(images.split(rows), labels.split(rows), strict=True)


def reference_of(
    data: Callable[[], Data], features: Callable[[Tensor], Tensor], folder: Path, device: torch.device, inception: str
) -> Reference:
    """The reference of the training images, computed once for each `inception` and then read from `folder`, for which
    `data` is not called."""
    moments_file, features_file = folder / "reference-moments.safetensors", folder / "reference-features.safetensors"
    card = {"inception": inception}
    if not (_is_of(moments_file, card) and _is_of(features_file, card)):
        pixels = data().train.pixels
        order = torch.randperm(len(pixels), generator=Generator().manual_seed(0))
        kept: list[Tensor] = []

        def found() -> Iterator[Tensor]:
            for some in order.split(PART):
                part = features(pixels[some].to(device))
                if sum(map(len, kept)) < KEPT:
                    kept.append(part.cpu())
                yield part

        folder.mkdir(parents=True, exist_ok=True)
        Moments.of_parts(found()).to("cpu").save(moments_file, f"{len(order):,} training images of CIFAR-10", **card)
        tensorfile.write(features_file, {"features": torch.cat(kept)[:KEPT].half()}, {"kind": "features", **card})
    moments, _ = Moments.load(moments_file)
    tensors, _ = tensorfile.read(features_file)
    return Reference(Frechet(moments.to(device)), tensors["features"].float().to(device))


def _is_of(file: Path, card: Mapping[str, str]) -> bool:
    """Whether a file is there and its header has all of a card."""
    return file.is_file() and card.items() <= tensorfile.read(file)[1].items()
