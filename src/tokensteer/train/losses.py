"""Bounds on the negative log-likelihood of diffusion models, in nats, and the losses made of them.

Masks, alpha(t) = 1 - t. The bound in continuous time is

    -log p(x_0)  <=  E_t E[ 1/t · sum over masked sites of -log p(x_0^l | x_t) ],     t ~ U(0, 1),

with weight -alpha'/(1 - alpha). This estimate has infinite variance: near t = 0, few masks meet a large weight. But a
set of k masked sites has weight  ∫ 1/t · t^k (1-t)^(L-k) dt = 1/(k · (L over k)),  so the same number is

    E_k E[ L/k · sum over masked sites of -log p(x_0^l | x_t) ],     k ~ U{1..L}, the k sites drawn uniformly,

with weights no larger than L. Given k, the time t is distributed as the k-th smallest of L uniform numbers. The sites
with the k smallest are masked, so that networks with a time input see the right joint distribution.

Uniform noise on V tokens: a site jumps at rate beta = -alpha'/alpha to a token drawn uniformly. The reverse process
jumps from i to j at rate (beta/V)·a_j with a_j = q(j | x_0)/q(i | x_0), and a model p(x_0 | x_t) jumps at rate
(beta/V)·b_j with b_j = E_p[q(j | x_0)/q(i | x_0)]. The bound is the divergence of the two processes,

    -log p(x_0)  <=  E_t E[ beta/V · sum over sites and j ≠ i of  a_j log(a_j/b_j) - a_j + b_j ].

Both bounds are tight for the exact denoiser: their mean over the data is then the entropy of the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tokensteer.core.numerics.domains import check_numbers, check_wholes

Predict = Callable[[Tensor, Tensor], Tensor]
"""log p(x_0 | x_t) per site, (P, L, V), from noisy ids (P, L) at times (P,)."""

Loss = Callable[[nn.Module, Tensor, Tensor | None, Generator], Tensor]
"""A loss () of a network on clean ids (P, L), with labels (P,) if there are any."""

EDGE = 1e-5
"""Uniform noise keeps t this far from 0 and 1, where its terms are 0/0; the effect on the bound is negligible."""


def strata(rows: int, generator: Generator, device: torch.device | str = "cpu") -> Tensor:
    """A uniform number in each of `rows` equal parts of [0, 1), (rows,): a mean over them has far less variance."""
    jitter = torch.rand(rows, generator=generator, device=device)
    return (torch.arange(rows, device=device) + jitter) / rows


def masked_bound(
    predict: Predict,
    x0: Tensor,
    mask_id: int,
    generator: Generator,
    u: Tensor | None = None,
    free: Tensor | None = None,
) -> Tensor:
    """Unbiased estimates of the bound, (P,); `u` (P,) in [0, 1) sets the share of masks, `strata` by default. With
    `free` (P, L), at least one in each row, it is the bound given all other sites, which are never masked."""
    x, hidden, time, weight = _hide(x0, mask_id, generator, u, free)
    nats = -predict(x, time).gather(-1, x0.unsqueeze(-1)).squeeze(-1)
    return torch.where(hidden, nats, 0.0).sum(-1) * weight


def _hide(
    x0: Tensor, mask_id: int, generator: Generator, u: Tensor | None, free: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The noisy x (P, L), which sites are masked (P, L), the times (P,) and L/k (P,), L being the free sites."""
    u = strata(len(x0), generator, x0.device) if u is None else u
    places = torch.rand(x0.shape, generator=generator, device=x0.device)
    length = torch.full_like(u, x0.shape[1]).long() if free is None else free.sum(-1)
    time, order = (places if free is None else places.masked_fill(~free, 2.0)).sort(-1)  # fixed sites come last
    count = torch.minimum((u * length).long(), length - 1).unsqueeze(-1) + 1
    first = torch.arange(x0.shape[1], device=x0.device) < count
    hidden = torch.zeros_like(first).scatter(-1, order, first)
    at = time.gather(-1, count - 1).squeeze(-1)
    return torch.where(hidden, mask_id, x0), hidden, at, length / count.squeeze(-1)


def uniform_bound(
    predict: Predict, x0: Tensor, vocab_size: int, generator: Generator, u: Tensor | None = None
) -> Tensor:
    """Unbiased estimates of the bound for uniform noise, (P,); `u` (P,) in [0, 1) sets the times, `strata` by default.

    Half of the rows draw t uniformly, half as for masks; with k of L sites noised, both are weighted as draws of the
    mixture, by 2/(1 + k/(L·t)). Noise at small t is rare and has large terms, so it is drawn more often.
    """
    rows, length = x0.shape
    u = (strata(rows, generator, x0.device) if u is None else u).unsqueeze(-1)
    places = torch.rand(x0.shape, generator=generator, device=x0.device)
    count = ((2.0 * u - 1.0) * length).long().clamp(0, length - 1)
    t = torch.where(u < 0.5, 2.0 * u, places.sort(-1).values.gather(-1, count))
    noised = places <= t
    noise = torch.randint(vocab_size, x0.shape, generator=generator, device=x0.device)
    x = torch.where(noised, noise, x0)
    t = t.clamp(EDGE, 1.0 - EDGE)
    weight = 2.0 / (1.0 + noised.sum(-1) / (length * t.squeeze(-1)))
    p = predict(x, t.squeeze(-1)).exp()
    # q(j | v)/q(i | v) is 1 for most clean tokens v, rho for v = i and 1/rho for v = j.
    rho = (t / (t + vocab_size * (1.0 - t))).unsqueeze(-1).to(p.dtype)
    here, clean = x.unsqueeze(-1), x0.unsqueeze(-1)
    b = 1.0 + p.gather(-1, here) * (rho - 1.0) + p * (1.0 / rho - 1.0)
    a = torch.where(here == clean, rho, torch.ones_like(p).scatter(-1, clean, (1.0 / rho).expand(*x.shape, 1)))
    rates = (a * (a.log() - b.log()) - a + b).scatter(-1, here, 0.0)
    return weight * (rates.sum(-1) / (vocab_size * (1.0 - t))).sum(-1)


def _logits(logits: Tensor, mask_id: int | None) -> Tensor:
    """Logits in float32 at least, -inf at the mask."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if mask_id is None:
        return logits
    return logits.masked_fill(torch.arange(logits.shape[-1], device=logits.device) == mask_id, -torch.inf)


def _predict(net: nn.Module, labels: Tensor | None, mask_id: int | None) -> Predict:
    return lambda x, t: _logits(net(x, t, labels), mask_id).log_softmax(-1)


def _dropped(labels: Tensor | None, share: float, generator: Generator) -> Tensor | None:
    """Labels with a share of them replaced by -1, so that the network learns to predict with them and without."""
    if labels is None:
        return None
    return labels.masked_fill(torch.rand(labels.shape, generator=generator, device=labels.device) < share, -1)


@dataclass(frozen=True)
class _Masked:
    mask_id: int
    label_dropout: float

    def __call__(self, net: nn.Module, x0: Tensor, labels: Tensor | None, generator: Generator) -> Tensor:
        predict = _predict(net, _dropped(labels, self.label_dropout, generator), self.mask_id)
        return masked_bound(predict, x0, self.mask_id, generator).mean() / x0.shape[1]


class _Headed(_Masked):
    def __call__(self, net: nn.Module, x0: Tensor, labels: Tensor | None, generator: Generator) -> Tensor:
        known, parts = _dropped(labels, self.label_dropout, generator), cast("Any", net)
        x, hidden, time, weight = _hide(x0, self.mask_id, generator, None)
        logits = _logits(parts.head(parts.hidden(x, time, known)[hidden]), self.mask_id)
        nats = F.cross_entropy(logits, x0[hidden], reduction="none")
        return (nats * weight.unsqueeze(-1).expand_as(hidden)[hidden]).sum() / x0.numel()


@dataclass(frozen=True)
class _Uniform:
    vocab_size: int
    label_dropout: float

    def __call__(self, net: nn.Module, x0: Tensor, labels: Tensor | None, generator: Generator) -> Tensor:
        predict = _predict(net, _dropped(labels, self.label_dropout, generator), None)
        return uniform_bound(predict, x0, self.vocab_size, generator).mean() / x0.shape[1]


@dataclass(frozen=True)
class _Classified:
    augment: Callable[[Tensor, Generator], Tensor] | None

    def __call__(self, net: nn.Module, x0: Tensor, labels: Tensor | None, generator: Generator) -> Tensor:
        if labels is None:
            raise ValueError("a classifier learns from labels: give fit(..., labels=...)")
        return F.nll_loss(net(x0 if self.augment is None else self.augment(x0, generator)), labels)


def masked_loss(mask_id: int, label_dropout: float = 0.1) -> Loss:
    """The masked bound in nats per site."""
    check_wholes("masked_loss", 0, mask_id=mask_id)
    check_numbers("masked_loss", "[0, 1]", label_dropout=label_dropout)
    return _Masked(mask_id, label_dropout)


def headed_loss(mask_id: int, label_dropout: float = 0.1) -> Loss:
    """`masked_loss` for a network whose logits are head(hidden(x, t, label)). It is the same number, but the head is
    applied at masked sites only, half of all, which saves time for a large vocabulary."""
    check_wholes("headed_loss", 0, mask_id=mask_id)
    check_numbers("headed_loss", "[0, 1]", label_dropout=label_dropout)
    return _Headed(mask_id, label_dropout)


def uniform_loss(vocab_size: int, label_dropout: float = 0.1) -> Loss:
    """The bound for uniform noise in nats per site; the network must use the time."""
    check_wholes("uniform_loss", 1, vocab_size=vocab_size)
    check_numbers("uniform_loss", "[0, 1]", label_dropout=label_dropout)
    return _Uniform(vocab_size, label_dropout)


def classifier_loss(augment: Callable[[Tensor, Generator], Tensor] | None = None) -> Loss:
    """Cross-entropy of a network that returns log-probabilities; `augment` changes its input ids (P, L)."""
    return _Classified(augment)
