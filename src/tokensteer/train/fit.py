"""The trainer: AdamW, warm-up and cosine, clipped gradients, an average of the weights, bf16 on a GPU.

All randomness comes from one generator, whose state is part of a checkpoint: a run that is killed and resumed ends with
the same weights, bit for bit on a CPU, as one that was not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Generator, Tensor, nn

from tokensteer.core.numerics.domains import check_numbers, check_wholes
from tokensteer.train.losses import Loss
from tokensteer.train.optim import Optimiser, described, described_net, digest, same_draws


@dataclass(frozen=True)
class Plan:
    """How long and how fast. With `seconds`, training ends then at the latest and the cosine follows the clock."""

    steps: int
    batch_size: int = 128
    rate: float = 2e-3
    warmup: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0
    average: float = 0.999
    seconds: float | None = None
    report_every: int = 20
    save_every: int = 500

    def __post_init__(self) -> None:
        counts = {"steps": self.steps, "batch_size": self.batch_size}
        check_wholes("Plan", 1, **counts, report_every=self.report_every, save_every=self.save_every)
        check_numbers("Plan", "(0, inf)", rate=self.rate, seconds=self.seconds)
        check_numbers("Plan", "(0, inf]", clip=self.clip)
        check_numbers("Plan", "[0, inf)", weight_decay=self.weight_decay)
        check_numbers("Plan", "[0, 1)", warmup=self.warmup, average=self.average)

    def done(self, step: int, seconds: float) -> float:
        """The share of the run that is over, 1 at the end."""
        return max(step / self.steps, 0.0 if self.seconds is None else seconds / self.seconds)

    def rate_at(self, done: float) -> float:
        """A linear warm-up, then half a cosine down to 0."""
        if done < self.warmup:
            return self.rate * (done + 1.0 / self.steps) / (self.warmup + 1.0 / self.steps)
        return self.rate * 0.5 * (1.0 + math.cos(math.pi * min(1.0, (done - self.warmup) / (1.0 - self.warmup))))


@dataclass(frozen=True)
class Report:
    """Where a run stands: `loss` is the mean since the last report. The report of the end has the loss of what is
    returned instead, the averaged network, on up to `report_every` fresh batches."""

    step: int
    done: float
    loss: float
    seconds: float


Watch = Callable[[Report], None]


@dataclass(frozen=True)
class Fitted:
    """The averaged network, and the report of the end, whose loss is that of this network."""

    net: nn.Module
    last: Report


def fit(
    net: nn.Module,
    loss: Loss,
    ids: Tensor,
    labels: Tensor | None = None,
    *,
    plan: Plan,
    generator: Generator,
    checkpoint: Path | None = None,
    watch: Watch | None = None,
) -> Fitted:
    """Train `net` on ids (D, L) of any integer type, with labels (D,) if the loss wants them, where `net` is.

    Batches are drawn with replacement. If the file `checkpoint` exists, the run goes on from there; one of another
    plan, seed, network, loss or data is refused.
    """
    device = next(net.parameters()).device
    given = {"network": described_net(net), "loss": described(loss), "data": digest(ids, labels)}
    ids, labels = ids.to(device), None if labels is None else labels.to(device)
    run = Optimiser(net.train(), asdict(plan) | given, generator, plan.weight_decay, plan.clip, plan.average)

    def of_batch(net: nn.Module, generator: Generator) -> Tensor:
        index = torch.randint(len(ids), (plan.batch_size,), generator=generator, device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return loss(net, ids[index].long(), None if labels is None else labels[index].long(), generator)

    def report(step: int, done: float, value: float, seconds: float) -> Report:
        if not math.isfinite(value):
            raise RuntimeError(f"the loss is {value} by step {step}: lower the rate, {plan.rate}")
        return Report(step, done, value, seconds)

    step, seconds, _ = run.resume(checkpoint)
    began = time.perf_counter() - seconds
    reported, total = step, torch.zeros((), device=device)
    while (done := plan.done(step, seconds)) < 1.0:
        value = of_batch(net, generator)
        value.backward()  # pyright: ignore[reportUnknownMemberType]
        run.learn(plan.rate_at(done))
        step, total, seconds = step + 1, total + value.detach(), time.perf_counter() - began
        done, entry = plan.done(step, seconds), None
        if step % plan.report_every == 0 and done < 1.0:  # reading the loss makes a GPU wait, so not at every step
            entry = report(step, done, float(total) / (step - reported), seconds)
            reported, total = step, torch.zeros_like(total)
        if checkpoint is not None and (step % plan.save_every == 0 or done >= 1.0):
            run.save(checkpoint, step, seconds)
        if watch is not None and entry is not None:
            watch(entry)
    best, fresh, batches = run.average.module.eval(), same_draws(generator), min(plan.report_every, step)
    mean = float(torch.stack([of_batch(best, fresh).detach() for _ in range(batches)]).mean())
    last = report(step, plan.done(step, seconds), mean, seconds)
    if watch is not None:
        watch(last)
    return Fitted(best, last)
