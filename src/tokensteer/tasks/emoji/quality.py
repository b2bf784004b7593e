"""How good samples of `emoji` are: whether the judge finds their captions, and KID beside the tokeniser's floor.

R@1 is the share of samples whose caption the judge, a network that nothing is steered by, prefers to those of up to 199
other samples. It is reported beside that of the real drawings and of their reconstructions. KID needs Inception
(`tasks.quality.features`), and is left out where the folder of data does not hold it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from tokensteer.core.steering.methods import pretrained
from tokensteer.files import write_json
from tokensteer.tasks.common.sheets import write_sheet
from tokensteer.tasks.common.task import Setup
from tokensteer.tasks.common.training import Training, say
from tokensteer.tasks.emoji.data import CONCEPT, PAIR, TRAIN, Drawings
from tokensteer.tasks.emoji.model import GUIDANCE, Networks, load_networks, reference
from tokensteer.tasks.emoji.states import States
from tokensteer.tasks.emoji.towers import one_of_each, reconstructed, retrieval, whole_captions
from tokensteer.tasks.quality.features import Inception, load_inception
from tokensteer.tasks.quality.kernel_distance import kid

FILE = "emoji-quality.json"
SPLITS = {"unseen pairs": PAIR, "unseen concepts": CONCEPT, "trained on": TRAIN}
GUIDANCES = (1.0, GUIDANCE, 2 * GUIDANCE)
SHOWN = 32  # drawings of a sheet: each above its reconstruction and samples of its caption
TOGETHER = 100  # captions that are drawn at once


def measure(
    folder: Path,
    training: Training,
    drawings: Drawings,
    states: States,
    samples: int,
    steps: int,
    trusted: Path | None = None,
) -> dict[str, Any]:
    """Samples of held-out captions under each guidance: R@1, KID and a sheet of each split, in `training.out`."""
    networks = load_networks(Setup(weights=folder, device=training.device))
    inception = _inception(training.device, trusted)
    generator = training.generator(100)
    found: dict[str, Any] = {}
    for name, split in SPLITS.items():
        some = one_of_each(drawings.part(split))
        if len(some.pixels) < 2:
            continue
        told = whole_captions(some, states.concepts.to(training.device))
        back = reconstructed(networks.tokeniser, some.pixels)
        rows = {"drawings": some.pixels, "reconstructions": back}
        for guidance in GUIDANCES:
            rows[f"samples, guidance {guidance:g}"] = draw(networks, some, guidance, steps, generator)
        found[name] = {key: {"R@1": retrieval(networks.judge, pixels, told)} for key, pixels in rows.items()}
        sheet = torch.cat([row[:SHOWN] for row in rows.values()])
        write_sheet(training.out / f"emoji-{name.replace(' ', '-')}.png", sheet, len(sheet) // len(rows), 1)
        say(f"{name}: {found[name]}")
    if inception is not None:
        found["KID"] = distances(networks, drawings, inception, samples, steps, generator)
        say(f"KID: {found['KID']}")
    write_json(training.out / FILE, found)
    return found


def draw(networks: Networks, drawings: Drawings, guidance: float, steps: int, generator: Generator) -> Tensor:
    """A sample of the whole caption of each drawing, as bytes (D, 3, H, W)."""
    captions = [texts[0] for texts in drawings.captions()]
    parts: list[Tensor] = []
    for start in range(0, len(captions), TOGETHER):
        told = networks.states(captions[start : start + TOGETHER])
        model = reference(networks.model(told, steps), guidance)
        result = pretrained(model)(1, len(told), generator=generator)
        parts.append(networks.pixels(result.samples[:, 0]))
    return torch.cat(parts)


def distances(
    networks: Networks, drawings: Drawings, inception: Inception, samples: int, steps: int, generator: Generator
) -> dict[str, dict[str, float | None]]:
    """KID of reconstructions and of samples of unseen pairs against the drawings of unseen pairs."""
    unseen = drawings.part(PAIR)
    unseen = unseen.take(torch.arange(min(samples, len(unseen.pixels)), device=unseen.concept.device))
    real = inception(unseen.pixels)
    rows = {"reconstructions": reconstructed(networks.tokeniser, unseen.pixels)}
    for guidance in GUIDANCES:
        rows[f"samples, guidance {guidance:g}"] = draw(networks, unseen, guidance, steps, generator)
    return {name: kid(inception(pixels), real, block=100).numbers() for name, pixels in rows.items()}


def _inception(device: str, trusted: Path | None) -> Inception | None:
    if trusted is not None:
        return load_inception(trusted, sha256=hashlib.sha256(trusted.read_bytes()).hexdigest(), device=device)
    try:
        return load_inception(device=device)
    except FileNotFoundError as error:
        say(f"KID is not measured: {error}")
        return None
