"""The denoiser of `emoji`: a masked transformer over the tokens of drawings, given the states of a caption or none.

There are fewer drawings than a network of this size can learn by heart, so each is seen in many places, some mirrored,
with one of several captions, and with dropout; the weights are those of the check with the lowest loss on unseen pairs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Generator, Tensor, nn

from tokensteer.tasks.common import grid_denoiser
from tokensteer.tasks.common.augment import augmented
from tokensteer.tasks.common.grid_denoiser import DROPPED, GridTraining, encoded
from tokensteer.tasks.emoji.data import CONCEPT, PAIR, TRAIN, Drawings
from tokensteer.tasks.emoji.render import SIDE
from tokensteer.tasks.emoji.states import LENGTH, States
from tokensteer.tasks.nets import FSQ, FSQConfig, GridTransformer, GridTransformerConfig
from tokensteer.train import Plan

TOKENISER = FSQConfig(
    SIDE,
    levels=(8, 6, 5),
    encoder_channels=(32, 64, 112),
    encoder_blocks=(1, 1, 2),
    decoder_channels=(48, 80, 144),
    decoder_blocks=(1, 2, 3),
)
TOKENISER_PLAN = Plan(15_000, batch_size=256, rate=8e-4, warmup=0.02, weight_decay=0.01, average=0.999)
CONFIG = GridTransformerConfig(
    TOKENISER.num_codes + 1,
    TOKENISER.grid,
    TOKENISER.grid,
    hidden=288,
    depth=9,
    heads=6,
    dropout=0.1,
    skips=True,
    coarse=5,
    context_length=LENGTH,
    context_width=384,
)
PLAN = Plan(40_000, batch_size=256, rate=1e-3, warmup=0.02, weight_decay=0.05, average=0.9995)
NOISE = 0.25
"""The largest share of a drawing's codes that are replaced before the tokeniser decodes them."""
COPIES = 16
"""Places in which the tokens of each drawing are computed."""
SPLITS = {"unseen pairs": PAIR, "unseen concepts": CONCEPT}
NATS = "nats per masked site"


class DenoiserTraining(GridTraining):
    """Steps on the drawings to train on; the others are for checks."""

    lowest = "unseen pairs"

    def __init__(
        self,
        net: GridTransformer,
        tokeniser: FSQ,
        drawings: Drawings,
        states: States,
        generator: Generator,
        plan: Plan = PLAN,
        compiled: bool = False,
        copies: int = COPIES,
    ) -> None:
        super().__init__(net, tokeniser, plan, compiled, {"copies": copies})
        seen = drawings.part(TRAIN)
        self.ids = torch.stack([encoded(tokeniser, _moved(seen, generator, k)) for k in range(copies)])
        self.states = states.take(_places(drawings, TRAIN)).captions.to(self.device)
        self.unseen = unseen(tokeniser, drawings, states)

    def batch(self, generator: Generator) -> tuple[Tensor, Tensor]:
        def draw(count: int) -> Tensor:
            return torch.randint(count, (self.batch_size,), generator=generator, device=self.device)

        row = draw(self.ids.shape[1])
        dropped = torch.rand(self.batch_size, 1, 1, generator=generator, device=self.device) < DROPPED
        states = self.states[row, draw(self.states.shape[1])].float()
        return self.ids[draw(len(self.ids)), row].long(), torch.where(dropped, 0.0, states)

    def check(self) -> dict[str, float]:
        return measure(self.learner.average, self.unseen, self.mask)


def _moved(drawings: Drawings, generator: Generator, copy: int) -> Tensor:
    """The pixels in their own place first, then in others."""
    return drawings.pixels if not copy else augmented(drawings.pixels, generator, may_turn=drawings.mirrors)


def _places(drawings: Drawings, split: int) -> Tensor:
    return (drawings.split == split).nonzero().squeeze(-1)


def unseen(tokeniser: FSQ, drawings: Drawings, states: States) -> dict[str, tuple[Tensor, Tensor]]:
    """Ids and whole captions of what is held out."""
    device, found = drawings.pixels.device, dict[str, tuple[Tensor, Tensor]]()
    for name, split in SPLITS.items():
        whole = states.take(_places(drawings, split)).captions[:, 0].to(device)
        found[name] = encoded(tokeniser, drawings.part(split).pixels), whole.float()
    return found


def measure(net: nn.Module, held_out: Mapping[str, tuple[Tensor, Tensor]], mask: int) -> dict[str, float]:
    """Nats per masked site with the caption and without, for each split that has drawings."""
    found: dict[str, float] = {}
    for name, (ids, states) in held_out.items():
        if len(ids):
            found |= grid_denoiser.measure(net, ids, states, mask, (name, f"{name} without caption"))
    return found
