"""Drawings and networks of `emoji` in toy size: the true classes, narrow, with drawings of plain colours."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from tokensteer.tasks import nets
from tokensteer.tasks.common import arrays
from tokensteer.tasks.common.wordpiece import WordPiece
from tokensteer.tasks.emoji import data, states, teachers
from tokensteer.tasks.emoji.model import Networks
from tokensteer.tasks.emoji.sources import STYLES
from tokensteer.tasks.emoji.train import Recipe
from tokensteer.tasks.nets.image_text import as_image_text
from tokensteer.tasks.nets.store import build
from tokensteer.train import Plan

SIDE, LENGTH, WIDTH = 16, 8, 16
COLOURS = {"red": (220, 30, 40), "green": (40, 190, 60), "blue": (30, 90, 240), "black": (10, 10, 10)}
FSQ = nets.FSQConfig(SIDE, (3, 3), (8, 8, 8), (1, 1, 1), (8, 8, 8), (1, 1, 1))
GRID = nets.GridTransformerConfig(
    10, 4, 4, hidden=16, depth=3, heads=2, skips=True, context_length=LENGTH, context_width=WIDTH, coarse=1
)
REWARD = nets.ImageTextConfig("resnet", asdict(nets.ResNetConfig(SIDE, 8, (8, 16), 1)), WIDTH)
JUDGE = nets.ImageTextConfig("mixer", asdict(nets.MixerConfig(SIDE, 8, 16, 2, 3)), WIDTH)
ENCODER = {"length": LENGTH, "width": WIDTH, "depth": 1, "heads": 2, "inner": 16}
PLAN = Plan(6, batch_size=16, rate=1e-2, warmup=0.1, average=0.9)


def features(part: str, device: str) -> teachers.Features:
    """A small image of each, in place of what a published network makes of it."""
    return lambda images: torch.nn.functional.avg_pool2d(images.to(device).float(), SIDE // 4).flatten(1)


RECIPE = Recipe(
    FSQ,
    GRID,
    REWARD,
    JUDGE,
    tokeniser_plan=PLAN,
    denoiser_plan=PLAN,
    teacher_plan=PLAN,
    tower_plan=PLAN,
    features=features,
    check=lambda: None,
    samples_of_teachers=8,
    copies=2,
    perceptual=False,
    samples=8,
    steps=2,
)


def write_drawings(file: Path) -> data.Drawings:
    """Squares and bars of a colour, in six styles, which differ in size; some pairs and one concept are held out."""
    names = [f"{colour} {shape}" for colour in COLOURS for shape in ("square", "bar")]
    images, style, concept = [], [], []
    for place, name in enumerate(names):
        colour, shape = name.split()
        for number in range(len(STYLES)):
            image = np.full((SIDE, SIDE, 3), 255, np.uint8)
            image[2 + number : 14, 2 : 14 if shape == "square" else 6] = COLOURS[colour]
            images.append(image)
            style.append(number)
            concept.append(place)
    pairs = zip(concept, style, strict=True)
    split = [data.CONCEPT if c == 5 else data.PAIR if (c + s) % 6 == 1 else data.TRAIN for c, s in pairs]
    arrays.write(
        file,
        images=np.stack(images),
        style=np.array(style, np.uint8),
        concept=np.array(concept, np.int16),
        split=np.array(split, np.uint8),
        names=np.array(names),
        tags=np.array(["\t".join(name.split()) for name in names]),
        groups=np.full(len(names), 8, np.int8),
    )
    return data.read(file)


def encoder() -> states.CaptionEncoder:
    torch.manual_seed(1)
    words = ["emoji", "style", "square", "bar", "heart", "a", ":", ";", ",", *COLOURS, *STYLES]
    letters = [f"{inner}{chr(k)}" for inner in ("", "##") for k in range(97, 123)]
    pieces = WordPiece.of(dict.fromkeys(["[CLS]", "[SEP]", "[UNK]", *words, *letters]))
    net = build(nets.TextEncoderConfig(len(pieces), **ENCODER))
    assert isinstance(net, nets.TextEncoder)
    return states.CaptionEncoder(net.eval().requires_grad_(False), pieces)


def networks(seed: int = 0, side: int = SIDE, levels: tuple[int, ...] = FSQ.levels) -> Networks:
    """All of them with random weights; the denoiser's output is not zero, so that captions differ."""
    torch.manual_seed(seed)
    codes = replace(FSQ, side=side, levels=levels)
    grid = replace(GRID, vocab_size=codes.num_codes + 1, height=codes.grid, width=codes.grid)
    scored = (replace(tower, body={**tower.body, "side": side}) for tower in (REWARD, JUDGE))
    tokeniser, denoiser, reward, judge = (build(config).eval() for config in (codes, grid, *scored))
    for name, weight in denoiser.named_parameters():
        if name.endswith(("out.weight", "down.weight", "tokens.weight")):
            torch.nn.init.normal_(weight)
    made = [net.requires_grad_(False) for net in (tokeniser, denoiser)]
    scorers = [as_image_text(net.requires_grad_(False)) for net in (reward, judge)]
    return Networks(*made, *scorers, encoder())  # type: ignore[arg-type]


def save(folder: Path) -> Path:
    """A folder of weights as training writes it."""
    made = networks()
    for role in ("tokeniser", "denoiser", "reward", "judge"):
        nets.save(getattr(made, role), folder / f"emoji-{role}.safetensors")
    states.store_encoder(made.encoder, folder)
    return folder
