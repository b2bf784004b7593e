"""Training of the tokeniser of colour images: an autoencoder whose images look like the originals.

The loss is the difference of pixels plus LPIPS. That is enough: for `cifar`, whose network and plan are the defaults
here, an H200 reaches a PSNR of 32.2 and LPIPS .025 in two minutes. With `adversarial`, after a third of the training, a
discriminator of patches is added, which is meant to make textures sharp. Its gradient with respect to the image is
scaled to a share of the gradient of the other terms: the two are comparable there, whatever the scale of the
discriminator's output, and the autoencoder is differentiated once. At a share of 0.4 the training collapsed as soon as
it came in, to a PSNR of 16. It is off by default, and its share is 0.1. The weights of the check with the lowest LPIPS
are those that are stored.

With `noise`, a share of the codes of half the images is replaced by those of other images before they are decoded. The
decoder learns to ignore a code that contradicts its neighbours, as a denoiser draws it now and then. The encoder learns
codes that repeat a part of what their neighbours hold, which are easier to predict (after Yang et al., 2025).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Protocol

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tokensteer.core.numerics.domains import check_number
from tokensteer.tasks.common.augment import augmented
from tokensteer.tasks.common.learner import Learner
from tokensteer.tasks.common.lpips import LPIPS
from tokensteer.tasks.common.timed_loop import Compiled, Trainee
from tokensteer.tasks.nets import FSQ, FSQConfig
from tokensteer.tasks.nets.parts import channels_last
from tokensteer.train import Plan
from tokensteer.train.optim import half_precision

CONFIG = FSQConfig()
PLAN = Plan(20_000, batch_size=256, rate=8e-4, warmup=0.02, weight_decay=0.01, average=0.999)
PERCEPTUAL = 1.0
"""The weight of LPIPS beside the mean difference of pixels from -1 to 1."""
ADVERSARIAL = 0.1
"""The gradient of the discriminator as a share of that of the other terms."""
ALONE, RISE = 1 / 3, 0.05
"""The shares of the training without a discriminator, and over which it comes in."""


class Pictured(Protocol):
    """Examples with pixels (D, 3, H, W) from 0 to 255 as uint8."""

    @property
    def pixels(self) -> Tensor: ...


class PatchDiscriminator(nn.Module):
    """How real each patch of 22 x 22 pixels looks, (P, H/4, W/4), of images (P, 3, H, W) in [0, 1]."""

    def __init__(self, channels: int = 64, groups: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, channels, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(channels, 2 * channels, 4, stride=2, padding=1),
            nn.GroupNorm(groups, 2 * channels),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * channels, 4 * channels, 3, padding=1),
            nn.GroupNorm(groups, 4 * channels),
            nn.LeakyReLU(0.2),
            nn.Conv2d(4 * channels, 1, 3, padding=1),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(2 * images - 1).squeeze(1)


class TokeniserTraining(Trainee):
    """Steps on `images`; `unseen` ones are for checks. Everything is on the device of the network."""

    def __init__(
        self,
        net: FSQ,
        images: Pictured,
        unseen: Pictured,
        perceptual: LPIPS | None,
        plan: Plan = PLAN,
        adversarial: bool = False,
        compiled: bool = False,
        noise: float = 0.0,
    ) -> None:
        device = next(net.parameters()).device
        self.device, self.images, self.unseen, self.batch_size = device, images, unseen, plan.batch_size
        check_number("noise", noise, "[0, 1]", "it is the largest share of codes that are replaced")
        self.noise = noise
        self.net = net = channels_last(net)
        self.learner = Learner(net, plan, betas=(0.9, 0.99))
        self.judge: Learner | None = None
        if adversarial:
            self.judge = Learner(channels_last(PatchDiscriminator(), device), plan, betas=(0.5, 0.9))
        judges = {} if self.judge is None else {"discriminator": self.judge}
        self.learners = {"tokeniser": self.learner, **judges}
        self.perceptual, self.lowest = perceptual, None if perceptual is None else "LPIPS"
        self.autoencode = Compiled(self._autoencoded, compiled)
        self.distance = Compiled(self._distance, compiled)
        self.compiled = (self.autoencode, self.distance) if compiled else ()
        self.given = {
            "config": asdict(net.config),
            "batch size": plan.batch_size,
            "adversarial": adversarial,
            "noise": noise,
        }

    def _autoencoded(self, images: Tensor, replaced: Tensor) -> Tensor:
        """Images as they come back if the sites that are `replaced`, (P, grid, grid), have the codes of another."""
        codes = self.net.rounding(self.net.numbers(images))
        return self.net.images(torch.where(replaced.unsqueeze(-1), codes.roll(1, 0).detach(), codes))

    def _replaced(self, rows: int, generator: Generator) -> Tensor:
        """A share of the sites from 0 to `noise` in half the rows, and none in the others."""
        grid = self.net.config.grid
        share = self.noise * (2 * torch.rand(rows, 1, 1, generator=generator, device=self.device) - 1)
        return torch.rand(rows, grid, grid, generator=generator, device=self.device) < share

    def _distance(self, found: Tensor, images: Tensor) -> Tensor:
        """The difference of pixels and LPIPS, (2,)."""
        pixels = 2 * (found - images).abs().mean()
        seen = pixels.new_zeros(()) if self.perceptual is None else self.perceptual(found, images).mean()
        return torch.stack([pixels, seen])

    def step(self, rate: float, done: float, generator: Generator) -> dict[str, Tensor]:
        index = torch.randint(len(self.images.pixels), (self.batch_size,), generator=generator, device=self.device)
        images = augmented(self.images.pixels[index], generator).float() / 255
        images = images.contiguous(memory_format=torch.channels_last)
        with half_precision(self.device):
            found = self.autoencode(images, self._replaced(len(images), generator))
        image = found.detach().float().requires_grad_()  # where the gradients of all terms meet
        with half_precision(self.device):
            pixels, seen = self.distance(image, images)
        loss = pixels + PERCEPTUAL * seen
        (slope,) = torch.autograd.grad(loss, image)
        shown = {"loss": loss, "pixels": pixels, "LPIPS": seen}
        if self.judge is not None and done >= ALONE:
            with half_precision(self.device):
                fooled = -self.judge.net(image).float().mean()
            (other,) = torch.autograd.grad(fooled, image)
            ratio = slope.square().sum() / other.square().sum().clamp(min=1e-24)
            share = ADVERSARIAL * min(1.0, (done - ALONE) / RISE)
            slope = slope + share * ratio.sqrt() * other
        torch.autograd.backward(found, slope.to(found.dtype))
        self.learner.learn(rate)
        if self.judge is not None and done >= ALONE:
            shown["discriminator"] = self._teach(self.judge, images, image.detach(), rate)
        return shown

    def _teach(self, judge: Learner, real: Tensor, made: Tensor, rate: float) -> Tensor:
        """One step of the discriminator with the hinge loss."""
        with half_precision(self.device):
            marks = judge.net(torch.cat([real, made])).float()
        loss = F.relu(1 - marks[: len(real)]).mean() + F.relu(1 + marks[len(real) :]).mean()
        torch.autograd.backward(loss)
        judge.learn(0.5 * rate)  # it is smaller, and learns faster
        return loss.detach()

    def check(self) -> dict[str, float]:
        return measure(self.learner.average, self.unseen, self.perceptual)


@torch.no_grad()
def measure(net: nn.Module, images: Pictured, perceptual: LPIPS | None, rows: int = 500) -> dict[str, float]:
    """The decoded images against the originals: PSNR in decibels, LPIPS, and how many codes are used evenly (the
    exponential of the entropy of ids)."""
    assert isinstance(net, FSQ)
    squares: list[Tensor] = []
    seen: list[Tensor] = []
    counts = torch.zeros(net.config.num_codes, dtype=torch.float64)
    for start in range(0, len(images.pixels), rows):
        real = images.pixels[start : start + rows].float() / 255
        ids = net.encode(real)
        made = net.decode(ids)
        squares.append((made - real).square().mean((1, 2, 3)))
        if perceptual is not None:
            seen.append(perceptual(made, real))
        counts += torch.bincount(ids.flatten(), minlength=len(counts)).double().cpu()
    shares = counts / counts.sum()
    found = {"PSNR": float(-10 * torch.cat(squares).clamp(min=1e-10).log10().mean())}
    if seen:
        found["LPIPS"] = float(torch.cat(seen).mean())
    return {**found, "codes used evenly": float((-torch.xlogy(shares, shares)).sum().exp())}
