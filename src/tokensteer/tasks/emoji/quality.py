"""How good samples of `emoji` are: whether the judge finds their captions, and KID beside the tokeniser's floor.

R@1 is the share of samples whose caption the judge, a network that nothing is steered by, prefers to those of up to 199
other samples. It is reported beside that of the real drawings and of their reconstructions. KID needs Inception
(`tasks.quality.features`) and no other network, so it is measured apart, of samples that were stored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from tokensteer.core.steering.methods import pretrained
from tokensteer.files import write_json
from tokensteer.tasks.common import arrays
from tokensteer.tasks.common.sheets import write_sheet
from tokensteer.tasks.common.task import Setup
from tokensteer.tasks.common.tokenised_images import reconstructed
from tokensteer.tasks.common.training import Training, say
from tokensteer.tasks.emoji.data import CONCEPT, PAIR, TRAIN, Drawings
from tokensteer.tasks.emoji.model import GUIDANCE, Networks, load_networks, reference
from tokensteer.tasks.emoji.states import States
from tokensteer.tasks.emoji.towers import CANDIDATES, one_of_each, retrieval, whole_captions
from tokensteer.tasks.quality.features import Inception
from tokensteer.tasks.quality.kernel_distance import kid

FILE, KID_FILE, SAMPLES = "emoji-quality.json", "emoji-quality-kid.json", "emoji-samples.npz"
SPLITS = {"unseen pairs": PAIR, "unseen concepts": CONCEPT, "trained on": TRAIN}
GUIDANCES = (1.0, GUIDANCE, 2 * GUIDANCE)
SHOWN = 32  # drawings of a sheet: each above its reconstruction and samples of its caption
TOGETHER = 100  # captions that are drawn at once


def measure(
    folder: Path, training: Training, drawings: Drawings, states: States, samples: int, steps: int
) -> dict[str, Any]:
    """Samples of captions of each split under each guidance: R@1 and a sheet, in `training.out`. Those of unseen pairs,
    of which there are up to `samples`, are stored for `distances`."""
    networks = load_networks(Setup(weights=folder, device=training.device))
    generator = training.generator(100)
    found: dict[str, Any] = {}
    for name, split in SPLITS.items():
        some = one_of_each(drawings.part(split), samples if split == PAIR else CANDIDATES)
        if len(some.pixels) < 2:
            continue
        rows = {"drawings": some.pixels, "reconstructions": reconstructed(networks.tokeniser, some.pixels)}
        for guidance in GUIDANCES:
            rows[f"samples, guidance {guidance:g}"] = draw(networks, some, guidance, steps, generator)
        vectors = whole_captions(some, states.concepts.to(training.device))
        few = torch.linspace(0, len(vectors) - 1, min(CANDIDATES, len(vectors)), device=vectors.device).long()
        found[name] = {key: {"R@1": retrieval(networks.judge, row[few], vectors[few])} for key, row in rows.items()}
        sheet = torch.cat([row[few[:SHOWN]] for row in rows.values()])
        write_sheet(training.out / f"emoji-{name.replace(' ', '-')}.png", sheet, len(sheet) // len(rows), 1)
        if split == PAIR:
            arrays.write(training.out / SAMPLES, **{key: row.cpu().numpy() for key, row in rows.items()})
        say(f"{name}: {found[name]}")
    write_json(training.out / FILE, found)
    return found


def draw(networks: Networks, drawings: Drawings, guidance: float, steps: int, generator: Generator) -> Tensor:
    """A sample of the whole caption of each drawing, as bytes (D, 3, H, W)."""
    captions = [texts[0] for texts in drawings.captions()]
    parts: list[Tensor] = []
    for start in range(0, len(captions), TOGETHER):
        caption_states = networks.states(captions[start : start + TOGETHER])
        model = reference(networks.model(caption_states, steps), guidance)
        result = pretrained(model)(1, len(caption_states), generator=generator)
        parts.append(networks.pixels(result.samples[:, 0]))
    return torch.cat(parts)


def distances(folder: Path, inception: Inception, block: int = 100) -> dict[str, dict[str, float | None]]:
    """KID of the stored reconstructions and samples of unseen pairs against their drawings."""
    names = ("drawings", "reconstructions", *(f"samples, guidance {guidance:g}" for guidance in GUIDANCES))
    if not (folder / SAMPLES).is_file():
        raise FileNotFoundError(f"there is no {folder / SAMPLES}: write it by --part quality")
    stored = arrays.read(folder / SAMPLES, names, "write it again by --part quality")
    features = {name: inception(torch.as_tensor(stored[name])) for name in names}
    real = features.pop("drawings")
    found = {
        name: kid(made, real, block=block, generator=Generator().manual_seed(0)).numbers()
        for name, made in features.items()
    }
    write_json(folder / KID_FILE, found)
    say(f"KID: {found}")
    return found
