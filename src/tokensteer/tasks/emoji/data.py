"""The drawings of `emoji` as one file: pixels, styles, concepts with their tags, and what is held out.

    python -m tokensteer.tasks.emoji --part data --out FOLDER

renders them from the packages in the folder of data. Which concepts and pairs are held out depends on their names
alone, so that a later version of a package changes little.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokensteer.tasks.common import arrays
from tokensteer.tasks.common.task import data_file
from tokensteer.tasks.emoji.captions import hashed, variants
from tokensteer.tasks.emoji.render import render
from tokensteer.tasks.emoji.sources import STYLES, Concept, Drawing

FILE = "emoji.npz"
TRAIN, PAIR, CONCEPT = 0, 1, 2
"""The splits: trained on, pairs of a concept and a style that are held out, and concepts that are."""
UNSEEN_CONCEPTS = 150
PAIRS = 0.4
"""The share of the other concepts of three styles or more of which one style is held out."""
FEWEST = 3
MIRRORED = (0, 1, 3, 4)
"""Groups of emojibase whose mirror images have the same name: faces, people, animals and food, but for names with left
or right. Flags, signs, clocks and letters are not mirrored."""
_NAMES = ("images", "style", "concept", "split", "names", "tags", "groups")
_TAB = "\t"


@dataclass(frozen=True)
class Drawings:
    """Pixels (D, 3, H, W) from 0 to 255 as uint8, and for each its style, concept and split, (D,)."""

    pixels: Tensor
    style: Tensor
    concept: Tensor
    split: Tensor
    concepts: Sequence[Concept]

    def take(self, index: Tensor) -> Drawings:
        return self._each(lambda part: part[index])

    def to(self, device: torch.device | str) -> Drawings:
        return self._each(lambda part: part.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Drawings:
        pixels, style, concept, split = map(change, (self.pixels, self.style, self.concept, self.split))
        return Drawings(pixels, style, concept, split, self.concepts)

    def part(self, split: int) -> Drawings:
        return self.take((self.split == split).nonzero().squeeze(-1))

    def styles(self, *names: str) -> Drawings:
        """Those of some styles."""
        wanted = torch.tensor([list(STYLES).index(name) for name in names], device=self.style.device)
        return self.take(torch.isin(self.style, wanted).nonzero().squeeze(-1))

    @cached_property
    def mirrors(self) -> Tensor:
        """Whether the mirror image of each has the same caption, (D,)."""
        may = [concept.group in MIRRORED and not _has_side(concept.name) for concept in self.concepts]
        return torch.tensor(may, device=self.concept.device)[self.concept]

    def captions(self) -> list[list[str]]:
        """The captions of each drawing, the whole one first."""
        styles = list(STYLES)
        pairs = zip(self.concept.cpu(), self.style.cpu(), strict=True)
        return [variants(self.concepts[int(concept)], styles[int(style)]) for concept, style in pairs]


def _has_side(name: str) -> bool:
    return any(word.startswith(("left", "right")) for word in name.lower().split())


def splits(pairs: Sequence[tuple[str, str]]) -> list[int]:
    """The split of each pair of a concept's name and a style. Of each concept one style at most is held out."""
    styles: dict[str, list[str]] = defaultdict(list)
    for name, style in pairs:
        styles[name].append(style)
    common = [name for name, drawn in styles.items() if len(drawn) >= FEWEST]
    unseen = set(sorted(common, key=lambda name: hashed(name, "concept"))[:UNSEEN_CONCEPTS])
    held = {
        name: min(styles[name], key=lambda style: hashed(name, style, "pair"))
        for name in common
        if name not in unseen and hashed(name, "held") < PAIRS * 2**64
    }
    return [CONCEPT if name in unseen else PAIR if held.get(name) == style else TRAIN for name, style in pairs]


def write(drawings: Sequence[Drawing], file: Path) -> None:
    """Render drawings and write them with all that belongs to them."""
    concepts = list(dict.fromkeys(drawing.concept for drawing in drawings))
    place = {concept: k for k, concept in enumerate(concepts)}
    styles = list(STYLES)
    arrays.write(
        file,
        images=np.stack([render(drawing) for drawing in drawings]),
        style=np.array([styles.index(drawing.style) for drawing in drawings], np.uint8),
        concept=np.array([place[drawing.concept] for drawing in drawings], np.int16),
        split=np.array(splits([(drawing.concept.name, drawing.style) for drawing in drawings]), np.uint8),
        names=np.array([concept.name for concept in concepts]),
        tags=np.array([_TAB.join(concept.tags) for concept in concepts]),
        groups=np.array([concept.group for concept in concepts], np.int8),
    )


def read(file: Path | None = None) -> Drawings:
    """The drawings of a file, by default of the folder of data."""
    if file is None:
        file = data_file(FILE, ", or write it by python -m tokensteer.tasks.emoji --part data --out that folder")
    found = arrays.read(file, _NAMES, "write it again by python -m tokensteer.tasks.emoji --part data")
    images: Any = found["images"]
    count = len(images)
    if images.ndim != 4 or images.dtype != np.uint8 or any(len(found[name]) != count for name in _NAMES[1:4]):
        raise ValueError(f"{file} has images of shape {images.shape} of {images.dtype}: write it again")
    concepts = [
        Concept(str(name), tuple(str(tags).split(_TAB)) if str(tags) else (), int(group))
        for name, tags, group in zip(found["names"], found["tags"], found["groups"], strict=True)
    ]
    style, concept, split = (torch.as_tensor(found[name].astype(np.int64)) for name in _NAMES[1:4])
    return Drawings(torch.as_tensor(images).permute(0, 3, 1, 2).contiguous(), style, concept, split, concepts)
