"""Training of denoisers and classifiers from data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import torch
from torch import Generator, Tensor, nn

from tokensteer.core.numerics.domains import check_wholes
from tokensteer.train.losses import Loss
from tokensteer.train.optim import Pace, described, described_net, digest, half_precision, same_draws
from tokensteer.train.rounds import Report, Trainee, run_rounds


@dataclass(frozen=True)
class Plan(Pace):
    """How long and how fast to train."""

    steps: int
    batch_size: int = 128
    _: KW_ONLY
    rate: float = 2e-3
    warmup: float = 0.05
    weight_decay: float = 0.01
    average: float = 0.999
    report_every: int = 20
    save_every: int = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wholes("Plan", 1, steps=self.steps, batch_size=self.batch_size)

    @property
    def total(self) -> int:
        return self.steps


Watch = Callable[[Report], None]
"""Called with the report of each evaluation."""


@dataclass(frozen=True)
class Fitted:
    """The averaged network, and its report: the loss on up to `report_every` fresh batches."""

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
    """Train `net` on its device, on ids (D, L) of any integer type, with labels (D,) if the loss needs them.

    Batches are drawn with replacement. If the file `checkpoint` exists, the run resumes from it; ValueError if it was
    written with another plan, seed, network, loss or data.
    """
    device = next(net.parameters()).device
    given = {"network": described_net(net), "loss": described(loss), "data": digest(ids, labels)}
    ids, labels = ids.to(device), None if labels is None else labels.to(device)

    def batch_loss(net: nn.Module, generator: Generator) -> Tensor:
        index = torch.randint(len(ids), (plan.batch_size,), generator=generator, device=device)
        with half_precision(device):
            return loss(net, ids[index].long(), None if labels is None else labels[index].long(), generator)

    trainee = _FromData(net, batch_loss, plan, generator)
    best = run_rounds(trainee, net, plan, given, generator, checkpoint=checkpoint, watch=watch)
    return Fitted(best, trainee.history[-1])


@dataclass(eq=False)
class _FromData(Trainee[Report]):
    """A round is one update from one batch."""

    net: nn.Module
    batch_loss: Callable[[nn.Module, Generator], Tensor]
    plan: Plan
    generator: Generator
    entry: type[Report] = field(default=Report, init=False)

    def round(self, done: float, update: Callable[[], None]) -> None:
        loss = self.batch_loss(self.net, self.generator)
        torch.autograd.backward(loss)
        self.losses.append(loss.detach())
        update()

    def report(self, average: nn.Module, step: int, done: float, seconds: float) -> Report:
        return Report(step, done, float(sum(self.losses)) / len(self.losses), seconds)

    def conclude(self, average: nn.Module, step: int, done: float, seconds: float) -> Report:
        fresh, batches = same_draws(self.generator), min(self.plan.report_every, step)
        losses = [self.batch_loss(average, fresh).detach() for _ in range(batches)]
        return Report(step, done, float(torch.stack(losses).mean()), seconds)
