"""Training of a proposal from sequences that the target accepts, such as those that the model was trained on.

Sequences that are samples of p and are accepted with a probability in proportion to exp(r/kl) are samples of the target
p(x) · exp(r(x)/kl) (rejection sampling). Of all proposals that factorise over sites their denoiser, in the states that
the sampler walks through, has the least KL(target | q). No paths are sampled. Sequences that are only like samples of
p, such as training data, give a q that is only like this one; weights correct for the rest.

The log-weight sums the errors of all sites. A proposal that can change little of the model errs less than one that
could learn everything: a `Change` of few units on the model's hidden states, below a head that stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tokensteer.train.fit import Plan

States = Callable[[int, Generator], tuple[Tensor, Tensor]]
"""From a number of rows to the sites that are open, (P, L), and those that open next, (P, L)."""


def accepted(log_w: Tensor, generator: Generator) -> Tensor:
    """The places (K,) of sequences with log-weights r/kl, (D,), that are accepted: those of the highest for sure."""
    if bool((log_w.isnan() | (log_w == torch.inf)).any()):
        raise ValueError("accepted: a reward is NaN or +inf: mend the reward, or leave such sequences out")
    if not bool(log_w.isfinite().any()):
        raise ValueError("accepted: no sequence has a finite reward: give others")
    chance = (log_w - log_w.max()).exp()
    return (torch.rand(chance.shape, generator=generator, device=chance.device) < chance).nonzero().flatten()


@dataclass(frozen=True)
class Accepted:
    """The objective of a proposal that learns from accepted sequences by `NextTokens`, by this plan."""

    plan: Plan


@dataclass(frozen=True, eq=False)
class NextTokens:
    """-log q of the tokens that open next, in nats per token, in states that `states` draws: a `losses.Loss` of a
    network whose logits are head(hidden(x))."""

    states: States
    mask_id: int

    def __call__(self, net: nn.Module, ids: Tensor, labels: Tensor | None, generator: Generator) -> Tensor:
        parts = cast("Any", net)
        opened, coming = self.states(len(ids), generator)
        hidden = parts.hidden(torch.where(opened, ids, self.mask_id))[coming]
        with torch.autocast(ids.device.type, enabled=False):
            logits = parts.head(hidden.float())
        mask = torch.arange(logits.shape[-1], device=logits.device) == self.mask_id
        return F.cross_entropy(logits.masked_fill(mask, -torch.inf), ids[coming])
