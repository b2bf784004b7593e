"""Training of the two classifiers of `cifar`, on disjoint halves of the training images.

The reward, a residual network, is what samples are steered by; the judge, a mixer of patches, measures them. They
share neither images nor architecture, so that what pleases the one by its errors seldom pleases the other.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tokensteer.tasks.cifar.data import CLASSES, SIDE, Images
from tokensteer.tasks.common.augment import distorted
from tokensteer.tasks.common.learner import Learner
from tokensteer.tasks.common.metrics import in_parts
from tokensteer.tasks.common.timed_loop import Compiled, Trainee
from tokensteer.tasks.nets import FSQ, MixerConfig, ResNetConfig
from tokensteer.tasks.nets.parts import channels_last
from tokensteer.train import Plan
from tokensteer.train.optim import half_precision

REWARD = ResNetConfig(SIDE, len(CLASSES))
JUDGE = MixerConfig(SIDE, len(CLASSES))
REWARD_PLAN = Plan(12_000, batch_size=512, rate=2e-3, warmup=0.1, weight_decay=0.05, average=0.998)
JUDGE_PLAN = Plan(12_000, batch_size=512, rate=4e-3, warmup=0.1, weight_decay=0.05, average=0.998)
HALVES = {"reward": 0, "judge": 1}
"""Which half of the training images each is trained on: those at even places, or at odd ones."""
SMOOTHED = 0.05  # of the labels


def half(images: Images, part: str) -> Images:
    """The training images of one of the two classifiers."""
    return Images(images.pixels[HALVES[part] :: 2], images.labels[HALVES[part] :: 2])


class ClassifierTraining(Trainee):
    """Steps on `images`; `unseen` ones are for checks. Everything is on the device of the network."""

    def __init__(self, net: nn.Module, images: Images, unseen: Images, plan: Plan, compiled: bool = False) -> None:
        self.device, self.batch_size = next(net.parameters()).device, plan.batch_size
        self.images, self.unseen = images, unseen
        net = channels_last(net)
        self.learner = Learner(net, plan)
        self.learners = {"classifier": self.learner}
        self.net = Compiled(net, compiled)
        self.compiled = (self.net,) if compiled else ()
        config: Any = net.config
        self.given = {"config": asdict(config), "batch size": plan.batch_size, "images": len(images.pixels)}

    def step(self, rate: float, done: float, generator: Generator) -> dict[str, Tensor]:
        index = torch.randint(len(self.images.pixels), (self.batch_size,), generator=generator, device=self.device)
        images = distorted(self.images.pixels[index].float() / 255, generator)
        with half_precision(self.device):
            log_p = self.net(images.contiguous(memory_format=torch.channels_last))
        loss = F.cross_entropy(log_p.float(), self.images.labels[index], label_smoothing=SMOOTHED)
        torch.autograd.backward(loss)
        self.learner.learn(rate)
        return {"loss": loss}

    def check(self) -> dict[str, float]:
        return measure(self.learner.average, self.unseen)


def measure(net: nn.Module, images: Images, tokeniser: FSQ | None = None) -> dict[str, float]:
    """The share of images whose most likely class is their label, and that of their reconstructions if a `tokeniser`
    is given: samples are decoded, so that is the accuracy that they are judged with."""

    def classified(pixels: Tensor) -> Tensor:
        real = pixels.float() / 255
        return net(real if tokeniser is None else tokeniser.decode(tokeniser.encode(real))).argmax(-1)

    right = in_parts(classified, images.pixels, 500) == images.labels
    return {"test accuracy": float(right.double().mean())}
