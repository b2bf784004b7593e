"""Straight-through gradients without one-hots, for networks that can be entered behind their embeddings.

The gradient of an estimate in the one-hots of x_t needs no one-hot anywhere: a draw x_0 is looked up in the reward's
embedding, and the gradient there times that embedding is what each token of x_0 is worth, s = g·E^T. It reaches x_t
directly, since what is drawn at a site has the law mu(x) = x[tokens] + x[mask]·mu there, and through the denoiser,
whose logits get mu·(s - <mu, s>). Only the sites that may move are spelt out over the vocabulary, once, whatever the
number of draws, and a few at a time; only their gradients in the embeddings are stored (`LowRankGradient`). The numbers
are those of `Sampled` on one-hots.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

from tokensteer.core.categorical.forms import CategoricalStore
from tokensteer.core.categorical.gradient_tilt import LowRankGradient, softmax_slope
from tokensteer.core.categorical.sites import SiteDistributions
from tokensteer.core.kernels.kernel import NO_MASK
from tokensteer.core.models.denoiser import Embedded, FromHidden, FromLogits
from tokensteer.core.models.diffusion import Diffusion, Model
from tokensteer.core.numerics.capture import capturing
from tokensteer.core.twists.estimators import NoisyState, Sampled
from tokensteer.core.twists.tilt import Tilt

SPELT = 2**29  # bytes of logits, and of what words are worth, spelt out at once


def takes_embeddings(model: Model, tilt: Tilt) -> bool:
    """Whether the denoiser and the reward can be entered, and nothing but a straight-through gradient is asked for."""
    if not isinstance(model, Diffusion) or model.kernel.mask_id == NO_MASK:
        return False
    straight = isinstance(tilt.estimator, Sampled) and tilt.differentiable
    return straight and isinstance(tilt.reward, Embedded) and _network(model) is not None


def _network(model: Diffusion) -> Embedded | None:
    denoiser = model.denoiser
    if not isinstance(denoiser, FromLogits | FromHidden) or not denoiser.ignores_time:
        return None
    network = denoiser.network if isinstance(denoiser, FromLogits) else denoiser.trunk
    return network if isinstance(network, Embedded) else None


def straight_through(
    model: Diffusion,
    tilt: Tilt,
    x: Tensor,
    t: float,
    where: Tensor,
    generator: Generator | None,
    noise: Tensor | None = None,
) -> tuple[CategoricalStore, Tensor, LowRankGradient]:
    """The laws at x (P, L), the estimate of the reward (P,) and its gradient at the sites `where` (P, L); `noise` is
    that of a `NoisyState`."""
    denoiser, network, reward = model.denoiser, _network(model), tilt.reward
    assert isinstance(denoiser, FromLogits | FromHidden)
    assert network is not None
    assert isinstance(reward, Embedded)
    mask_id, sites = model.kernel.mask_id, _Sites(where)
    with torch.inference_mode(False), torch.enable_grad():
        entered = network.embedding.detach()[x].requires_grad_()
        answer = network.of_embeddings(entered)
    store = denoiser.kept(answer.detach())
    index = torch.arange(x.numel(), device=x.device).view_as(x)
    assert isinstance(tilt.estimator, Sampled)
    x0 = tilt.estimator.clean(tilt, NoisyState(x, SiteDistributions(store, index), t, mask_id, noise), generator)
    rewarded = reward.embedding.detach()
    # A guess: what the reward keeps for its way back, eight layers or so, beside what the denoiser keeps for its own.
    per_row = 128 * x0[:, 0].numel() * rewarded.shape[-1] * rewarded.itemsize
    parts = tilt.chunks.stretches(
        lambda rows: _slope_of_drawn(tilt, reward, x0[:, rows], store.dtype), len(x), per_row, x.device
    )
    estimate, drawn = (torch.cat(of_parts) for of_parts in zip(*parts, strict=True))
    through, expected = _through_law(denoiser, answer.detach().flatten(0, 1), drawn, rewarded, sites(), x.flatten())
    (read,) = torch.autograd.grad(answer, entered, through.view_as(answer))
    slopes = LowRankGradient(drawn, rewarded, read.flatten(0, 1), network.embedding.detach(), expected, mask_id)
    return store, tilt.floored(estimate), slopes


def _slope_of_drawn(tilt: Tilt, reward: Embedded, x0: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The estimate from M clean sequences x0 (M, P, L), (P,), and its slope in their embeddings, summed, (P·L, d)."""
    with torch.inference_mode(False), torch.enable_grad():
        drawn = reward.embedding.detach()[x0.flatten(0, 1)].requires_grad_()
        log_v = torch.zeros(x0.shape[:2], dtype=dtype, device=x0.device)
        r = tilt.checked(reward.of_embeddings(drawn), len(drawn), drawn.device)
        estimate = tilt.average(r.view_as(log_v), log_v, tilt.kl)
        (slope,) = torch.autograd.grad(estimate.sum(), drawn)
    return estimate.detach(), slope.reshape(len(x0), -1, slope.shape[-1]).sum(0)


def _through_law(
    denoiser: FromLogits | FromHidden, answer: Tensor, drawn: Tensor, rewarded: Tensor, sites: Tensor, x: Tensor
) -> tuple[Tensor, Tensor]:
    """The slope of the estimate in the network's answer (P·L, ...) through the laws of what is drawn, and the mean
    worth of a draw (P·L,); both at the `sites` (k,), a few at a time, 0 elsewhere."""
    vocab_size, mask_id = len(rewarded), denoiser.mask_id
    through = torch.zeros_like(answer)
    expected = torch.zeros(len(x), dtype=torch.promote_types(drawn.dtype, torch.float32), device=x.device)
    rewarded, head = _aligned(rewarded), denoiser.head if isinstance(denoiser, FromHidden) else None
    weight, bias = (None, None) if head is None else (_aligned(head.weight.detach()), head.bias)
    bias = None if bias is None else _aligned(bias.detach())
    for part in torch.split(sites, max(1, SPELT // (2 * drawn.itemsize * vocab_size))):
        logits = answer[part] if weight is None else linear(answer[part], weight, bias)
        slope, mean = softmax_slope(logits, drawn[part] @ rewarded.T, vocab_size, mask_id)
        expected[part] = mean.to(expected.dtype)
        # At an open site the prediction is not read, so only what is drawn there matters.
        open_site = (x[part] != mask_id).unsqueeze(-1)
        through[part] = (slope if weight is None else slope @ weight).masked_fill(open_site, 0.0)
    return through, expected


def _aligned(table: Tensor) -> Tensor:
    """A table of words (V, ...) with zeros at its end: products on a GPU are three times slower if V is odd."""
    missing = -len(table) % 64 if table.is_cuda else 0
    return torch.cat([table, table.new_zeros(missing, *table.shape[1:])]) if missing else table


class _Sites:
    """The sites of a mask (P, L) as indices (k,). On a GPU the host learns how many there are while it has other
    things to do, so that it does not wait."""

    def __init__(self, where: Tensor) -> None:
        self.where = where.flatten()
        if where.is_cuda and not capturing():
            self.count = self.where.sum().to("cpu", non_blocking=True)
            self.known = torch.cuda.current_stream(where.device).record_event()

    def __call__(self) -> Tensor:
        if not self.where.is_cuda:
            return self.where.nonzero().squeeze(-1)
        if capturing():  # the host will not be there to count them
            return torch.arange(len(self.where), device=self.where.device)
        self.known.synchronize()
        return self.where.byte().argsort(descending=True, stable=True)[: int(self.count)]
