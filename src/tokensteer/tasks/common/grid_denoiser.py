"""Training of denoisers of grids of tokens: masked transformers over the tokens of images, given a condition or none.

A share cos(πu/2) of the sites is masked, u uniform: more often many than few, as in the first half of the sampling,
where most is decided. The loss is the mean cross-entropy of the masked sites; without the weight 1/t of the bound on
the likelihood it has a small variance, and the same minimum for a network that can represent every conditional.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tokensteer.tasks.common.learner import Learner
from tokensteer.tasks.common.part_training import PartTraining
from tokensteer.tasks.common.timed_loop import Compiled, Trainee
from tokensteer.tasks.nets import FSQ, GridTransformer, GridTransformerConfig
from tokensteer.tasks.nets.store import build
from tokensteer.train import Plan
from tokensteer.train.frozen import fingerprint
from tokensteer.train.optim import half_precision

DROPPED = 0.1
"""The share of training rows without their condition, from which the model without one is learned."""

WAVES = 2.0
"""Of the embeddings to begin with: those of codes at a distance d, of numbers from -1 to 1, correlate by exp(-2d²)."""


class GridTraining(Trainee):
    """Steps of a network of the tokens of `tokeniser`. Everything is on the device of the network."""

    def __init__(
        self, net: GridTransformer, tokeniser: FSQ, plan: Plan, compiled: bool, given: Mapping[str, Any] | None = None
    ) -> None:
        self.device, self.batch_size = next(net.parameters()).device, plan.batch_size
        self.mask = tokeniser.config.num_codes
        self.learner = Learner(net, plan, muon=True)
        self.learners = {"denoiser": self.learner}
        self.net = net
        self.loss = Compiled(self._loss, compiled, captured=True)
        self.compiled = (self.loss,) if compiled else ()
        config = {name: value for name, value in asdict(net.config).items() if name != "dropout"}
        of_tokeniser = {"tokeniser": fingerprint(tokeniser.parameters())}
        self.given = {"config": config, "batch size": plan.batch_size, **of_tokeniser, **(given or {})}

    @abstractmethod
    def batch(self, generator: Generator) -> tuple[Tensor, Tensor]:
        """Ids (P, L) of `batch_size` examples, and the condition of each, (P, ...), with a share `DROPPED` of them
        replaced by none."""

    def _loss(self, noisy: Tensor, condition: Tensor, ids: Tensor) -> Tensor:
        """The mean over masked sites."""
        nats, sites = masked_nats(self.net, noisy, condition, ids, self.mask)
        return nats / sites

    def step(self, rate: float, done: float, generator: Generator) -> dict[str, Tensor]:
        ids, condition = self.batch(generator)
        noisy = masked(ids, self.mask, generator)
        with half_precision(self.device):
            loss = self.loss(noisy, condition, ids)
        torch.autograd.backward(loss)
        self.learner.learn(rate)
        return {"loss": loss}


def untrained(
    work: PartTraining, config: GridTransformerConfig, tokeniser: FSQ
) -> tuple[GridTransformer, dict[str, Any]]:
    """The network before this training, and the entry of its card about an earlier one, which had the same tokeniser
    and may have had another dropout."""
    net = build(config).to(work.device)
    assert isinstance(net, GridTransformer)
    if work.pieces.start is None:
        embed_codes(net, tokeniser)
        return net, {}
    found, before = work.earlier(config, tokeniser=fingerprint(tokeniser.parameters()))
    net.load_state_dict(found.state_dict())
    return net, before


@torch.no_grad()
def embed_codes(net: GridTransformer, tokeniser: FSQ) -> None:
    """Embeddings to begin with that are near for codes that are near: waves of the numbers of a code, in random
    directions. What is learned of a code then holds for its neighbours until training separates them."""
    codes, table = tokeniser.rounding.table[:-1], net.tokens.weight
    waves = WAVES * torch.randn(codes.shape[1], table.shape[1], device=codes.device)
    phases = 2 * math.pi * torch.rand(table.shape[1], device=codes.device)
    table[: len(codes)] = table.std() * 2**0.5 * torch.cos(codes @ waves + phases)


@torch.no_grad()
def encoded(tokeniser: FSQ, pixels: Tensor, rows: int = 1000) -> Tensor:
    """Ids (D, L) as int16 of images (D, 3, H, W) of bytes."""
    return torch.cat([tokeniser.encode(part.float() / 255).short() for part in torch.split(pixels, rows)])


def masked(ids: Tensor, mask: int, generator: Generator) -> Tensor:
    """Ids (P, L) with a share of the sites masked, one at least."""
    u, sites = (torch.rand(shape, generator=generator, device=ids.device) for shape in ((len(ids), 1), ids.shape))
    share = torch.cos(0.5 * math.pi * u)
    hidden = (sites < share) | (sites == sites.amin(1, keepdim=True))
    return torch.where(hidden, mask, ids)


def masked_nats(
    net: nn.Module, noisy: Tensor, condition: Tensor | None, ids: Tensor, mask: int
) -> tuple[Tensor, Tensor]:
    """The sum over masked sites of -log p(id), and the number of these sites. The mask itself is no prediction."""
    logits = net(noisy, condition)[..., :mask].float()
    nats = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")
    hidden = (noisy == mask).flatten()
    return (nats * hidden).sum(), hidden.sum()


@torch.no_grad()
def measure(
    net: nn.Module,
    ids: Tensor,
    condition: Tensor,
    mask: int,
    names: tuple[str, str],
    rows: int = 500,
) -> dict[str, float]:
    """Nats per masked site with the condition and without, under masks that are the same in every call."""
    generator = Generator(ids.device).manual_seed(0)
    total = torch.zeros(2, dtype=torch.float64, device=ids.device)
    sites = torch.zeros(2, dtype=torch.float64, device=ids.device)
    for start in range(0, len(ids), rows):
        part, some = ids[start : start + rows].long(), condition[start : start + rows]
        noisy = masked(part, mask, generator)
        with half_precision(ids.device):
            found = [masked_nats(net, noisy, given, part, mask) for given in (some, None)]
        total += torch.stack([nats for nats, _ in found])
        sites += torch.stack([count for _, count in found])
    return {name: float(mean) for name, mean in zip(names, total / sites, strict=True)}
