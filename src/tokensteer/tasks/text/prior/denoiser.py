"""Training of the prior's denoiser, from MiniLM's encoder, on texts of the corpus and some real reviews.

The loss is the bound on -log p(x) in nats per token: k of the L sites are masked, k uniform in 1..L, and the
cross-entropy is averaged over them. In a share of the rows the first few sites are never masked, because samples are
drawn after a prompt. Shapes are fixed, so that torch.compile sees one: the head is computed at a fixed number of sites,
a little more than are masked, since the numbers k of a batch are spread evenly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from tokensteer.tasks.common.learner import Learner
from tokensteer.tasks.common.timed_loop import Compiled, Trainee
from tokensteer.tasks.nets.encoder import Encoder, EncoderConfig
from tokensteer.tasks.text.corpus.windows import LENGTH, SIZE
from tokensteer.train import Plan
from tokensteer.train.losses import strata
from tokensteer.train.optim import half_precision

CONFIG = EncoderConfig(SIZE, LENGTH, depth=6, more=6)
PLAN = Plan(20_000, batch_size=768, rate=1e-3, warmup=0.03, weight_decay=0.05, average=0.9995)
REAL = 0.06
"""The share of real reviews in a batch."""
PROMPTED, PROMPT = 0.3, 6
"""The share of rows that keep a beginning, and its largest number of tokens."""
CAPACITY = 0.53
"""Sites at which the head is computed, as a share of all."""

Draw = Callable[[int, Generator], Tensor]
"""Ids (rows, L) of clean texts."""


class DenoiserTraining(Trainee):
    """Steps on texts that `draw` returns; `unseen` (D, L) are for checks. With `muon`, matrices are moved by Muon."""

    counted = "texts"

    def __init__(
        self,
        net: Encoder,
        draw: Draw,
        unseen: Tensor,
        mask_id: int,
        plan: Plan = PLAN,
        compiled: bool = False,
        muon: bool = False,
    ) -> None:
        self.device, self.batch_size = next(net.parameters()).device, plan.batch_size
        self.net, self.draw, self.unseen, self.mask_id = net, draw, unseen, mask_id
        self.learner = Learner(net, plan, muon=muon)
        self.learners = {"denoiser": self.learner}
        self.loss = Compiled(self._loss, compiled)
        self.compiled = (self.loss,) if compiled else ()
        self.given = {"config": asdict(net.config), "batch size": plan.batch_size, "muon": muon}

    def _loss(self, noisy: Tensor, ids: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        return bound(self.net, noisy, ids, weight, chosen, self.mask_id)

    def step(self, rate: float, done: float, generator: Generator) -> dict[str, Tensor]:
        ids = self.draw(self.batch_size, generator)
        noisy, weight = masked(ids, self.mask_id, generator, PROMPTED)
        with half_precision(self.device):
            loss = self.loss(noisy, ids, weight, sites(weight))
        torch.autograd.backward(loss)
        self.learner.learn(rate)
        return {"loss": loss}

    def check(self) -> dict[str, float]:
        return {"unseen": measure(self.learner.average, self.unseen, self.mask_id)}


def masked(ids: Tensor, mask_id: int, generator: Generator, prompted: float = 0.0) -> tuple[Tensor, Tensor]:
    """Ids (P, L) with k sites of each row masked, and weights (P, L): 1/k at these, else 0. A share `prompted` of the
    rows keeps its first sites."""
    rows, length = ids.shape
    device = ids.device
    u = strata(rows, generator, device)[torch.randperm(rows, generator=generator, device=device)]
    kept = torch.randint(1, PROMPT + 1, (rows, 1), generator=generator, device=device).clamp(max=length - 1)
    kept = kept * (torch.rand(rows, 1, generator=generator, device=device) < prompted)
    order = torch.rand(ids.shape, generator=generator, device=device)
    order = order.masked_fill(torch.arange(length, device=device) < kept, 2.0).argsort(-1).argsort(-1)
    free = length - kept
    count = torch.minimum((u.unsqueeze(-1) * free).long(), free - 1) + 1
    hidden = order < count
    return torch.where(hidden, mask_id, ids), hidden / count


def sites(weight: Tensor) -> Tensor:
    """A fixed number of sites of the flattened (P, L), the masked ones among them."""
    rows, length = weight.shape
    most = min(weight.numel(), round(rows * length * CAPACITY) + 2 * length)
    return (weight.flatten() > 0).float().argsort(descending=True)[:most]


def bound(net: Encoder, noisy: Tensor, ids: Tensor, weight: Tensor, chosen: Tensor, mask_id: int) -> Tensor:
    """Nats per token, from the head at `chosen` sites alone."""
    hidden = net.hidden(noisy).flatten(0, 1)[chosen]
    logits = net.head(hidden).float()
    logits = logits.masked_fill(torch.arange(logits.shape[-1], device=logits.device) == mask_id, -torch.inf)
    nats = F.cross_entropy(logits, ids.flatten()[chosen], reduction="none")
    return (nats * weight.flatten()[chosen]).sum() / len(ids)


@torch.no_grad()
def measure(net: torch.nn.Module, ids: Tensor, mask_id: int, rows: int = 256) -> float:
    """The bound in nats per token on ids (D, L), under masks that are the same in every call."""
    assert isinstance(net, Encoder)
    generator = Generator(ids.device).manual_seed(0)
    total = 0.0
    for start in range(0, len(ids), rows):
        part = ids[start : start + rows].long()
        noisy, weight = masked(part, mask_id, generator)
        with half_precision(ids.device):
            total += len(part) * float(bound(net, noisy, part, weight, sites(weight), mask_id))
    return total / len(ids)
