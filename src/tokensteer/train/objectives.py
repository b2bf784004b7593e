"""Objectives for proposals: log-weights with less variance.

With G_t = psi_s(x_s) - psi_t(x_t) + log p(x_s | x_t) - log q(x_s | x_t) the log-weight of a move,

- `StepVariance`, the mean of (G_t - F)² over chosen steps. With a baseline F(x_t, t) it is zero exactly at the locally
  optimal q* ∝ p · exp(psi_s), whatever policy walked the paths; with F(t), as in the paper, it cannot be zero unless
  the twist is already the value function.
- `Balance`, in which F(x_t, t) is itself the log-twist, v: the mean of (v(x_j) - v(x_i) + sum of log p/q from i to j)²
  over stretches of the path, with v = r/kl at the end. Its zero is the global optimum: v is the value function of the
  sampler, q = p · V_s/V_t, and all weights are equal. `decay` weights longer stretches: 0 for single steps (detailed
  balance), inf for whole paths (trajectory balance), anything in between for all (sub-trajectory balance).
- `Returns`, for the twist of a q that is no longer trained: the mean of (v(x_t) - log-weight still to come)². Its zero
  is the mean of that log-weight under q, which is the log of the value function less what q still lacks. With `twists`,
  the tilt's own estimate is subtracted first, and v is added to that estimate.
- `Contrastive`, for the same: tell states of the target's paths from states of the model's (contrastive twist learning,
  Zhao et al., 2024; noise-contrastive estimation). The log-odds are the log of the model's value function less log Z,
  whatever q is, and no square of a log-weight is taken.
- `PathVariance`, the variance of the log-weight of whole paths, without any baseline: the same optimum for q.

Gradients are accumulated over a few steps at a time, so that memory does not grow with the number of steps. Objectives
of whole paths take two passes: the derivative in every log q and v, then its chain into the networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus

from tokensteer.core.kernels.jumps import OneSite
from tokensteer.core.kernels.measure import SiteMeasure
from tokensteer.core.models.denoiser import Time
from tokensteer.core.numerics.domains import check_numbers, check_wholes
from tokensteer.core.numerics.draws import NEVER
from tokensteer.train.paths import Transitions

Baseline = Callable[[Tensor, Time], Tensor]


@dataclass(frozen=True)
class Batch:
    """The moves that one update learns from, and the steps that count. `rows` go through the networks at once.

    `entropy` and `kl` are the coefficients of -H(q) and KL(q | p), both exact for the transition.
    """

    moves: Transitions
    baseline: Baseline
    steps: Sequence[int]
    rows: int = 4096
    entropy: float = 0.0
    kl: float = 0.0

    def __post_init__(self) -> None:
        check_wholes("Batch", 1, rows=self.rows)
        check_numbers("Batch", "[0, inf)", entropy=self.entropy, kl=self.kl)

    @cached_property
    def parts(self) -> list[list[int]]:
        few = max(1, self.rows // len(self.moves.paths))
        steps = list(self.steps)
        return [steps[i : i + few] for i in range(0, len(steps), few)]

    def expected(self, steps: Sequence[int]) -> Tensor:
        """F at the beginning of each of `steps`, (K, P)."""
        return torch.stack(self.moves.outputs(self.baseline, steps)).to(self.moves.paths.log_p.dtype)

    def penalty(self, steps: Sequence[int], measures: Sequence[SiteMeasure]) -> Tensor | float:
        """The regularisers, summed over `steps`."""
        if not self.entropy and not self.kl:
            return 0.0
        total = torch.zeros((), device=self.moves.paths.x.device)
        for k, q in zip(steps, measures, strict=True):
            if not q.factorises and not isinstance(q, OneSite):  # the table of a jump has all of its mass, too
                raise ValueError(
                    "entropy and kl are sums over sites, and the sites of this kernel's moves hang together: leave "
                    "both at 0, or train with another kernel, such as Ancestral"
                )
            log_q = q.dense().log_p
            log_p = self._base(k) if self.kl else torch.zeros_like(log_q)
            # Impossible tokens add nothing, and their logs are kept out of the graph.
            gap = torch.where(log_q > NEVER, (self.entropy + self.kl) * log_q - self.kl * log_p, 0.0)
            total = total + self.moves.paths.mean((log_q.exp() * gap).sum((-2, -1)))
        return total

    @torch.no_grad()
    def _base(self, k: int) -> Tensor:
        model, x = self.moves.model, self.moves.paths.x[k]
        sites = None if self.moves.paths.sites is None else self.moves.paths.sites[k]
        return model.transition(x, model.predict(x, self.moves.time(k)), model.steps[k], sites).dense().log_p


class Objective(Protocol):
    """Accumulates `share` times the gradients of a batch and returns its loss. `twists`: it needs log-twists on the
    way; `whole`: it needs all steps; `passes`: how often it evaluates the proposal's network at a move."""

    @property
    def twists(self) -> bool: ...
    @property
    def whole(self) -> bool: ...
    @property
    def passes(self) -> int: ...
    def backward(self, batch: Batch, share: float, /) -> Tensor: ...


@dataclass(frozen=True)
class StepVariance:
    """The mean of (log-weight of a move - F)² over the steps of a batch."""

    twists: bool = True
    whole: bool = False
    passes: int = field(default=1, init=False, repr=False)

    def backward(self, batch: Batch, share: float, /) -> Tensor:
        paths, total = batch.moves.paths, torch.zeros((), device=batch.moves.paths.x.device)
        for part in batch.parts:
            measures = batch.moves.measures(part)
            rise = torch.stack([paths.log_twist[k + 1] - paths.log_twist[k] + paths.log_p[k] for k in part])
            spread = rise - batch.moves.log_q(part, measures) - batch.expected(part)
            loss = paths.mean(spread.square()).sum() / len(batch.steps)
            total = total + loss.detach()
            torch.autograd.backward(share * (loss + batch.penalty(part, measures) / len(batch.steps)))
        return total


@dataclass(frozen=True)
class Balance:
    """The mean of (v_j - v_i + sum of log p/q)² over stretches i..j of a path, each weighted by decay^(length - 1).

    A share `ends` of the weight goes to the stretches that reach the end, where v is known: the others only propagate
    what was learned there.
    """

    decay: float = 0.9
    ends: float = 0.0
    twists: bool = False
    whole: bool = True
    passes: int = field(default=2, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.decay >= 0:
            raise ValueError(f"Balance.decay must be 0 or more, got {self.decay}: 0 for steps, inf for whole paths")
        check_numbers("Balance", "[0, 1]", ends=self.ends)

    def backward(self, batch: Batch, share: float, /) -> Tensor:
        paths = batch.moves.paths

        def loss(log_q: Tensor, value: Tensor) -> Tensor:
            gone = torch.cat([torch.zeros_like(log_q[:1]), (paths.log_p - log_q).cumsum(0)])
            level = torch.cat([value, paths.log_twist[-1:]]) + gone
            return (self._pairs(level) * paths.mean((level.unsqueeze(0) - level.unsqueeze(1)).square())).sum()

        return _two_passes(batch, share, loss)

    def _pairs(self, level: Tensor) -> Tensor:
        """The weight of each stretch from i to j, (T + 1, T + 1); they sum to 1."""
        place = torch.arange(len(level), device=level.device, dtype=level.dtype)
        length = place.unsqueeze(0) - place.unsqueeze(1)
        if self.decay == math.inf:
            return (length == len(level) - 1).to(level.dtype)
        weight = torch.where(length > 0, self.decay ** (length - 1).clamp(min=0), 0.0)
        last = torch.zeros_like(weight)
        last[:-1, -1] = 1.0 / (len(level) - 1)
        return (1.0 - self.ends) * weight / weight.sum() + self.ends * last


@dataclass(frozen=True)
class Returns:
    """The mean of (v - log-weight still to come)² over the steps of a batch, from paths that q walked as it is: freeze
    its network. Paths that are not `on_policy` are walked by the model up to a random time and by q from then on, and
    only the moves of q count: a twist must be right at particles that q would not have made."""

    twists: bool = False
    whole: bool = False
    passes: int = field(default=0, init=False, repr=False)

    def backward(self, batch: Batch, share: float, /) -> Tensor:
        paths = batch.moves.paths
        to_come = paths.log_twist[-1] + paths.log_ratio.flip(0).cumsum(0).flip(0)
        if self.twists:
            to_come = to_come - paths.log_twist[:-1]
        total = torch.zeros((), device=paths.x.device)
        for part in batch.parts:
            loss = paths.mean((batch.expected(part) - to_come[part]).square()).sum() / len(batch.steps)
            total = total + loss.detach()
            torch.autograd.backward(share * loss)
        return total


@dataclass(frozen=True)
class Contrastive:
    """The mean over steps of log(1 + exp(-v)) at the target's states and of log(1 + exp(v)) at the model's. Both are
    those of the same paths, by importance weights. With `twists`, v is added to the tilt's own estimate."""

    twists: bool = False
    whole: bool = False
    passes: int = field(default=0, init=False, repr=False)

    def backward(self, batch: Batch, share: float, /) -> Tensor:
        paths, populations = batch.moves.paths, batch.moves.model.populations
        log_p = paths.log_ratio.sum(0) + (0.0 if paths.share is None else paths.share.log())
        model, target = (w.view(populations, -1).softmax(-1).flatten() for w in (log_p, log_p + paths.log_twist[-1]))
        total = torch.zeros((), device=paths.x.device)
        for part in batch.parts:
            odds = batch.expected(part) + (paths.log_twist[part] if self.twists else 0.0)
            apart = target * softplus(-odds) + model * softplus(odds)
            loss = apart.sum() / (populations * len(batch.steps))
            total = total + loss.detach()
            torch.autograd.backward(share * loss)
        return total


@dataclass(frozen=True)
class PathVariance:
    """The variance of the log-weight of whole paths."""

    twists: bool = False
    whole: bool = True
    passes: int = field(default=2, init=False, repr=False)

    def backward(self, batch: Batch, share: float, /) -> Tensor:
        paths, populations = batch.moves.paths, batch.moves.model.populations

        def loss(log_q: Tensor, value: Tensor) -> Tensor:
            log_w = (paths.log_p - log_q).sum(0) + paths.log_twist[-1]
            if populations > 1:  # each template has a normaliser of its own
                log_w = log_w.view(populations, -1)
                return (log_w - log_w.mean(-1, keepdim=True)).square().mean()
            return paths.mean((log_w - paths.mean(log_w)).square())

        return _two_passes(batch, share, loss)


def _two_passes(batch: Batch, share: float, loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Accumulate the gradients of loss(log q, v), both (T, P), over all steps."""
    with torch.no_grad():
        log_q = torch.cat([batch.moves.log_q(part) for part in batch.parts])
        value = torch.cat([batch.expected(part) for part in batch.parts])
    log_q.requires_grad_()
    value.requires_grad_()
    total = loss(log_q, value)
    by_log_q, by_value = torch.autograd.grad(total, (log_q, value), materialize_grads=True)
    first = 0
    for part in batch.parts:
        here = slice(first, first + len(part))
        first += len(part)
        measures = batch.moves.measures(part)
        surrogate = (by_log_q[here] * batch.moves.log_q(part, measures)).sum()
        surrogate = surrogate + (by_value[here] * batch.expected(part)).sum()
        torch.autograd.backward(share * (surrogate + batch.penalty(part, measures) / len(batch.steps)))
    return total.detach()
