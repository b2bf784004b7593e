"""Training of a proposal by likelihood, on samples of the target.

Paths count by their importance weights, so that their ends are samples of the target p(x) · exp(r(x)/kl), whoever
walked them. The denoiser of these samples is the best proposal that factorises over sites: it minimises
KL(target | q), and has mass wherever the target has (reweighted wake-sleep, Bornschein and Bengio, 2015; neural
adaptive SMC, Gu et al., 2015). It learns as any denoiser does, by the bound of `losses`: an update takes one pass of a
batch, and no paths, twists or baselines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tokensteer.core.kernels.kernel import NO_MASK
from tokensteer.core.models.context import context_rows, population_of
from tokensteer.core.models.diffusion import Model
from tokensteer.core.numerics.domains import check_numbers, check_wholes
from tokensteer.core.particles.resampling import ess
from tokensteer.train.losses import Predict, masked_bound
from tokensteer.train.optim import half_precision
from tokensteer.train.paths import Paths
from tokensteer.train.proposal_trainee import ProposalTrainee


@dataclass(frozen=True)
class Likelihood:
    """-log q of the target's samples, in batches of `batch_size` from all paths in memory.

    Paths count by their weights to the power of at most 1, the highest at which the effective sample size of a set of
    paths is a share `least` of it: weights become exact as q becomes better.
    """

    batch_size: int = 256
    least: float = 0.1
    twists: bool = field(default=False, init=False, repr=False)
    whole: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        check_wholes("Likelihood", 1, batch_size=self.batch_size)
        check_numbers("Likelihood", "[0, 1)", least=self.least)

    def weights(self, paths: Paths, populations: int) -> Tensor:
        """The weights of paths, (P,), which sum to their effective sample size: a better set counts more."""
        log_w = (paths.log_twist[-1] + paths.log_ratio.sum(0)).double().view(populations, -1)
        low, power = torch.zeros_like(log_w[:, :1]), torch.ones_like(log_w[:, :1])
        high = power
        for _ in range(20):  # bisection, without reading the device
            enough = ess(power * log_w).unsqueeze(-1) >= self.least * log_w.shape[1]
            low, high = torch.where(enough, power, low), torch.where(enough, high, power)
            power = 0.5 * (low + high)
        tempered = low * log_w
        return (tempered.softmax(-1) * ess(tempered).unsqueeze(-1)).flatten()


@dataclass(eq=False)
class LikelihoodTrainee(ProposalTrainee[Likelihood]):
    """A round walks paths, adds their ends to `memory`, and makes updates from batches of all that is there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        model = self.steering.model
        if model.kernel.mask_id == NO_MASK:
            raise ValueError("Likelihood is for masked processes: use StepVariance, Balance or PathVariance here")
        if self.plan.entropy or self.plan.kl:
            raise ValueError("Likelihood has no regularisers: leave entropy and kl of the plan at 0")
        self.free = model.base.canvas(model.populations) == model.kernel.mask_id
        self.clock = share_of_masks_to_time(model)

    def round(self, done: float, update: Callable[[], None]) -> None:
        self.memory = [*self.memory, *self._walk()][-max(2, self.plan.replay) :]
        bank = self._bank(self.memory, self.plan.amount(done))
        for _ in range(self.plan.updates):
            self._learn(*bank)
            update()

    def _walk(self) -> list[Paths]:
        batch = [_ends(paths) for paths in super()._walk()]
        self.newest = batch[0]
        return batch

    def _backward(self, batch: Sequence[Paths], amount: float) -> None:
        self._learn(*self._bank(batch, amount))

    def _bank(self, batch: Sequence[Paths], amount: float) -> tuple[Tensor, Tensor, Tensor]:
        """Samples (D, L), the population of each and its weight, (D,)."""
        populations = len(self.free)
        weights = [self.objective.weights(paths.scaled(amount), populations) for paths in batch]
        of = [population_of(paths.x[-1], populations) for paths in batch]
        return torch.cat([paths.x[-1] for paths in batch]), torch.cat(of), torch.cat(weights)

    def _learn(self, x0: Tensor, of: Tensor, weights: Tensor) -> None:
        """Accumulate the gradients of one update."""
        rows = torch.multinomial(weights, self.objective.batch_size, replacement=True, generator=self.generator)
        predict, mask_id = self._predict(of[rows]), self.own.model.kernel.mask_id
        with half_precision(x0.device):
            nats = masked_bound(predict, x0[rows], mask_id, self.generator, free=self.free[of[rows]])
            loss = nats.mean() / x0.shape[1]
        torch.autograd.backward(loss)
        self.rows += len(rows)
        self.losses.append(loss.detach())

    def _predict(self, of: Tensor) -> Predict:
        """The proposal's network, with the context of the population of each row."""
        context = context_rows(self.own.model.base.conditions, of, len(of))
        return lambda x, share: self.denoiser(x, self.clock(share), *context)


def _ends(paths: Paths) -> Paths:
    """What is remembered of paths."""
    return replace(
        paths,
        x=paths.x[-1:],
        log_twist=paths.log_twist[-1:],
        log_p=paths.log_p[:0],
        log_ratio=paths.log_ratio.sum(0, keepdim=True),
        sites=None,
        times=None,
    )


def share_of_masks_to_time(model: Model) -> Callable[[Tensor], Tensor]:
    """The time at which a token is masked with a given probability: linear between the times of the model's steps, and
    the probability itself if the kernel has no forward process."""
    times, alpha = [0.0], [1.0]
    for step in reversed(model.steps):
        times.append(step.t)
        alpha.append(alpha[-1] * model.kernel.survival(step))
    if math.isclose(alpha[-1], 1.0):
        return lambda share: share
    t, noise = (torch.tensor(v, dtype=model.dtype, device=model.device) for v in (times, [1.0 - a for a in alpha]))

    def to_time(share: Tensor) -> Tensor:
        place = torch.searchsorted(noise, share.to(noise).contiguous()).clamp(1, len(noise) - 1)
        part = (share - noise[place - 1]) / (noise[place] - noise[place - 1])
        return (t[place - 1] + part.clamp(0.0, 1.0) * (t[place] - t[place - 1])).to(model.dtype)

    return to_time
