"""Training of a proposal from labelled sequences, such as those that the model was trained on.

Let a sequence x_0 have the label y = 1 with probability exp(r(x_0)/kl), for a reward that is nowhere positive. For a
state x_t and a masked site l, Bayes' rule says

    P(y | x_t, x_0^l = v) / P(y | x_t)  =  q*(v) / p(v),

where q* is the denoiser of the target p(x_0) · exp(r(x_0)/kl): the best proposal that factorises over sites. So
F(x_t) + log q(v) - log p(v), with a number F for each state, is made log P(y) given the state and the token of one of
its masked sites, by cross-entropy. What is learned is the ratio q/p alone. Likelihood on samples of the target would
learn all of q anew, and what it missed of p would cost effective sample size.

It is the probability and not its odds: of a state where y is all but certain, every token has nearly the same
probability of y and very different odds, so that a loss on the odds would make the ratio noisy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

SITES = 8  # masked sites of a state that are learned from
SHARP = 50.0
"""log P(y) is -softplus(-SHARP·u)/SHARP, a smooth min(u, 0) of u = F + log q - log p."""


class Headed(Protocol):
    """A network of logits head(hidden(x))."""

    @property
    def head(self) -> nn.Linear: ...
    def hidden(self, x: Tensor) -> Tensor: ...


class Contrasted(nn.Module):
    """The network of a proposal, which begins as the model's, with log P(y) of its states: at first `chance`."""

    def __init__(self, net: nn.Module, width: int, chance: float) -> None:
        super().__init__()
        self.net, self.state = net, nn.Linear(width, 1)
        nn.init.zeros_(self.state.weight)
        nn.init.constant_(self.state.bias, math.log(chance))


States = Callable[[int, Generator], tuple[Tensor, Tensor]]
"""From a number of rows to the sites that are open, (P, L), and those that open next, (P, L)."""


@dataclass(frozen=True, eq=False)
class ContrastLoss:
    """The cross-entropy of labels (P,), 1 or 0, of clean ids (P, L): a `losses.Loss` of a `Contrasted` network, where
    `model` is the network that it began as, in states that `states` draws. `often` is how often an example with the
    label 1 was repeated, and counts as much less."""

    model: Headed
    states: States
    mask_id: int
    often: float = 1.0

    def __call__(self, net: nn.Module, ids: Tensor, labels: Tensor | None, generator: Generator) -> Tensor:
        assert isinstance(net, Contrasted)
        assert labels is not None
        own: Headed = net.net  # pyright: ignore[reportAssignmentType]
        opened, coming = self.states(len(ids), generator)
        x = torch.where(opened, ids, self.mask_id)
        score = torch.rand(x.shape, generator=generator, device=x.device) + coming.float() - 4.0 * opened.float()
        score, sites = score.topk(min(SITES, x.shape[1]), -1)
        hidden = own.hidden(x)
        with torch.no_grad():
            log_p = _log_prob(self.model, self.model.hidden(x), ids, sites)
        log_q = _log_prob(own, hidden, ids, sites)
        with torch.autocast(x.device.type, enabled=False):  # half precision is coarser than 1/SHARP
            sharp = SHARP * (net.state(hidden.float().mean(1)) + log_q - log_p)
        log_y = -F.softplus(-sharp) / SHARP
        # log(1 - P(y)): by its limit where P(y) is 1 to the last digit, and would have no gradient
        log_not = torch.where(sharp > 15.0, -sharp - math.log(SHARP), (-torch.expm1(log_y)).clamp(min=1e-30).log())
        loss = torch.where(labels.unsqueeze(1) > 0, -log_y / self.often, -log_not)
        masked = (score > -2.0).to(loss.dtype)
        return (loss * masked).sum() / masked.sum()


def _log_prob(net: Headed, hidden: Tensor, ids: Tensor, sites: Tensor) -> Tensor:
    """log mu^l(ids^l) at sites (P, K), from hidden states (P, L, H)."""
    some = hidden.gather(1, sites.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
    with torch.autocast(hidden.device.type, enabled=False):
        logits = net.head(some.float())
    return logits.log_softmax(-1).gather(-1, ids.gather(1, sites).unsqueeze(-1)).squeeze(-1)
