"""Training of the denoiser of `cifar`: a masked transformer over the tokens of images, given a class or none.

A share cos(πu/2) of the sites is masked, u uniform: more often many than few, as in the first half of the sampling,
where most is decided. The loss is the mean cross-entropy of the masked sites; without the weight 1/t of the bound on
the likelihood it has a small variance, and the same minimum for a network that can represent every conditional.
"""

from __future__ import annotations

import math
from dataclasses import asdict

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tokensteer.tasks.cifar.data import CLASSES, Images
from tokensteer.tasks.cifar.tokeniser import CONFIG as TOKENISER
from tokensteer.tasks.common.learner import Learner
from tokensteer.tasks.common.timed_loop import Compiled, Trainee
from tokensteer.tasks.nets import FSQ, GridTransformer, GridTransformerConfig
from tokensteer.train import Plan
from tokensteer.train.frozen import fingerprint
from tokensteer.train.optim import half_precision

MASK = TOKENISER.num_codes
CONFIG = GridTransformerConfig(
    MASK + 1,
    TOKENISER.side // 2,
    TOKENISER.side // 2,
    hidden=384,
    depth=8,
    heads=6,
    num_classes=len(CLASSES),
    skips=True,
)
PLAN = Plan(60_000, batch_size=256, rate=1e-3, warmup=0.02, weight_decay=0.03, average=0.9995)
UNLABELLED = 0.1
"""The share of training rows without their class, from which the model without a class is learned."""


@torch.no_grad()
def tokens(tokeniser: FSQ, images: Images, mirrored: bool, rows: int = 1000) -> tuple[Tensor, Tensor]:
    """Ids (D, L) as int16 and labels (D,) of images, followed by those of their mirror images if `mirrored`."""
    pixels = [images.pixels, images.pixels.flip(-1)] if mirrored else [images.pixels]
    found = [
        tokeniser.encode(some[start : start + rows].float() / 255).short()
        for some in pixels
        for start in range(0, len(some), rows)
    ]
    return torch.cat(found), images.labels.repeat(len(pixels))


class DenoiserTraining(Trainee):
    """Steps on the tokens of `images`; `unseen` ones are for checks. Everything is on the device of the network."""

    def __init__(
        self,
        net: GridTransformer,
        tokeniser: FSQ,
        images: Images,
        unseen: Images,
        plan: Plan = PLAN,
        compiled: bool = False,
    ) -> None:
        self.device, self.batch_size = next(net.parameters()).device, plan.batch_size
        self.mask, self.no_class = tokeniser.config.num_codes, net.config.num_classes
        self.ids, self.labels = tokens(tokeniser, images, mirrored=True)
        self.unseen = tokens(tokeniser, unseen, mirrored=False)
        self.learner = Learner(net, plan, muon=True)
        self.learners = {"denoiser": self.learner}
        self.net = net
        self.loss = Compiled(self._loss, compiled)
        self.compiled = (self.loss,) if compiled else ()
        config = {name: value for name, value in asdict(net.config).items() if name != "dropout"}
        self.given = {"config": config, "batch size": plan.batch_size, "tokeniser": fingerprint(tokeniser.parameters())}

    def _loss(self, noisy: Tensor, labels: Tensor, ids: Tensor) -> Tensor:
        return masked_cross_entropy(self.net, noisy, labels, ids, self.mask)

    def step(self, rate: float, done: float, generator: Generator) -> dict[str, Tensor]:
        index = torch.randint(len(self.ids), (self.batch_size,), generator=generator, device=self.device)
        ids, labels = self.ids[index].long(), self.labels[index]
        noisy = masked(ids, self.mask, generator)
        dropped = torch.rand(len(ids), generator=generator, device=self.device) < UNLABELLED
        with half_precision(self.device):
            loss = self.loss(noisy, torch.where(dropped, self.no_class, labels), ids)
        torch.autograd.backward(loss)
        self.learner.learn(rate)
        return {"loss": loss}

    def check(self) -> dict[str, float]:
        return measure(self.learner.average, *self.unseen, self.mask)


def masked(ids: Tensor, mask: int, generator: Generator) -> Tensor:
    """Ids (P, L) with a share of the sites masked, one at least."""
    u, sites = (torch.rand(shape, generator=generator, device=ids.device) for shape in ((len(ids), 1), ids.shape))
    share = torch.cos(0.5 * math.pi * u)
    hidden = (sites < share) | (sites == sites.amin(1, keepdim=True))
    return torch.where(hidden, mask, ids)


def masked_cross_entropy(net: nn.Module, noisy: Tensor, labels: Tensor | None, ids: Tensor, mask: int) -> Tensor:
    """The mean over masked sites of -log p(id). The mask itself is no prediction."""
    logits = net(noisy, labels)[..., :mask].float()
    nats = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")
    hidden = (noisy == mask).flatten()
    return (nats * hidden).sum() / hidden.sum()


@torch.no_grad()
def measure(net: nn.Module, ids: Tensor, labels: Tensor, mask: int, rows: int = 500) -> dict[str, float]:
    """Nats per masked site with the class and without, under masks that are the same in every call."""
    generator = Generator(ids.device).manual_seed(0)
    nats: dict[str, list[Tensor]] = {"unseen": [], "unseen without class": []}
    for start in range(0, len(ids), rows):
        part, some = ids[start : start + rows].long(), labels[start : start + rows]
        noisy = masked(part, mask, generator)
        with half_precision(ids.device):
            nats["unseen"].append(masked_cross_entropy(net, noisy, some, part, mask))
            nats["unseen without class"].append(masked_cross_entropy(net, noisy, None, part, mask))
    return {name: float(torch.stack(values).mean()) for name, values in nats.items()}
