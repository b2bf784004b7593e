"""Captions of drawings: the whole one, and the variants that training chooses from."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from tokensteer.tasks.emoji.sources import Concept

VARIANTS = 5
"""Captions of a drawing."""
SEPARATOR = ", "


def hashed(*words: str) -> int:
    """A number from 0 to 2^64 - 1 that depends on the words alone."""
    return int.from_bytes(hashlib.sha256("/".join(words).encode()).digest()[:8], "big")


def caption(concept: Concept, style: str, tags: Sequence[str] | None = None) -> str:
    """ "{style} emoji: {name}; {tags}", with the concept's own tags if none are given."""
    listed = concept.tags if tags is None else tags
    named = f"{style} emoji: {concept.name}"
    return f"{named}; {SEPARATOR.join(listed)}" if listed else named


def variants(concept: Concept, style: str) -> list[str]:
    """`VARIANTS` captions, the whole one first: with all tags, without tags, as a phrase, with some tags in another
    order, and a phrase of tags. They are the same in every call."""
    draw = random.Random(hashed(concept.name, style, "tags"))
    tags = list(concept.tags)
    draw.shuffle(tags)
    some = tags[: draw.randint(1, len(tags))] if tags else []
    return [
        caption(concept, style),
        caption(concept, style, ()),
        phrase(concept.name, style),
        caption(concept, style, some),
        f"{phrase(concept.name, style)}, {SEPARATOR.join(some[:3])}" if some else phrase(concept.name, style),
    ]


def phrase(name: str, style: str) -> str:
    """ "a blue heart, flat style"."""
    plain = name.replace(":", "")
    article = "an" if plain[:1].lower() in "aeiou" else "a"
    return f"{article} {plain}, {style} style"
