"""Straight-through gradients without one-hots, for networks that take embeddings.

The result equals that of `Sampled` on one-hots. A draw x_0 is embedded for the reward; with g the gradient there and E
the embedding, each token of x_0 has the gradient s = g·E^T. It reaches x_t directly, since a draw has the distribution
mu(x) = x[tokens] + x[mask]·mu, and through the denoiser, whose logits get the gradient mu·(s - <mu, s>). Tables over
the vocabulary are made only for movable sites, a few at a time and once for all draws; only gradients in the embeddings
are stored (`LowRankGradient`).
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

from tokensteer.core.categorical.forms import CategoricalStore
from tokensteer.core.categorical.gradient_tilt import LowRankGradient, softmax_slope
from tokensteer.core.categorical.sites import SiteDistributions
from tokensteer.core.kernels.kernel import NO_MASK
from tokensteer.core.models.context import Context, context_rows
from tokensteer.core.models.denoiser import Embedded, FromHidden, FromLogits
from tokensteer.core.models.diffusion import Diffusion, Model
from tokensteer.core.numerics.capture import capturing
from tokensteer.core.twists.estimators import NoisyState, Sampled
from tokensteer.core.twists.tilt import Tilt

TABLES = 2**29  # bytes of logits and token gradients held at once


def takes_embeddings(model: Model, tilt: Tilt) -> bool:
    """Whether the denoiser and the reward take embeddings and the gradient is straight-through."""
    return _parts(model, tilt) is not None


def _parts(model: Model, tilt: Tilt) -> tuple[FromLogits | FromHidden, Embedded, Embedded, Sampled] | None:
    """The denoiser, its network, the reward and the estimator, if all are as `straight_through` needs them."""
    denoiser = model.denoiser if isinstance(model, Diffusion) and model.kernel.mask_id != NO_MASK else None
    if not isinstance(denoiser, FromLogits | FromHidden) or not denoiser.ignores_time or not tilt.differentiable:
        return None
    network = denoiser.network if isinstance(denoiser, FromLogits) else denoiser.trunk
    if isinstance(network, Embedded) and isinstance(tilt.reward, Embedded) and isinstance(tilt.estimator, Sampled):
        return denoiser, network, tilt.reward, tilt.estimator
    return None


def straight_through(
    model: Diffusion,
    tilt: Tilt,
    x: Tensor,
    t: float,
    where: Tensor,
    generator: Generator | None,
    noise: Tensor | None = None,
    context: Context = (),
    of: Tensor | None = None,
) -> tuple[CategoricalStore, Tensor, LowRankGradient]:
    """The prediction at x (P, L), the estimate (P,), its gradient at sites `where` (P, L); `noise` as in NoisyState,
    `context` and population `of` each row."""
    parts = _parts(model, tilt)
    assert parts is not None, "see takes_embeddings"
    denoiser, network, reward, estimator = parts
    mask_id, sites = model.kernel.mask_id, _Sites(where)
    with torch.inference_mode(False), torch.enable_grad():
        embedded = network.embedding.detach()[x].requires_grad_()
        answer = network.of_embeddings(embedded, *context)
    store = denoiser.kept(answer.detach())
    index = torch.arange(x.numel(), device=x.device).view_as(x)
    x0 = estimator.clean(tilt, NoisyState(x, SiteDistributions(store, index), t, mask_id, noise), generator)
    rewarded = reward.embedding.detach()
    # A guess of the activations that the reward keeps for its backward pass, about eight layers.
    per_row = 128 * x0[:, 0].numel() * rewarded.shape[-1] * rewarded.itemsize
    chunks = tilt.chunks.stretches(
        lambda rows: _slope_of_drawn(tilt, reward, x0[:, rows], store.dtype, None if of is None else of[rows]),
        len(x),
        per_row,
        x.device,
    )
    estimate, drawn = (torch.cat(of_parts) for of_parts in zip(*chunks, strict=True))
    through, expected = _through_logits(denoiser, answer.detach().flatten(0, 1), drawn, rewarded, sites(), x.flatten())
    (read,) = torch.autograd.grad(answer, embedded, through.view_as(answer))
    slopes = LowRankGradient(drawn, rewarded, read.flatten(0, 1), network.embedding.detach(), expected, mask_id)
    return store, tilt.floored(estimate), slopes


def _slope_of_drawn(
    tilt: Tilt, reward: Embedded, x0: Tensor, dtype: torch.dtype, of: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The estimate (P,) from clean sequences x0 (M, P, L), and its gradient in their embeddings, summed, (P·L, d)."""
    context = context_rows(tilt.conditions, None if of is None else of.repeat(len(x0)), x0[..., 0].numel())
    with torch.inference_mode(False), torch.enable_grad():
        drawn = reward.embedding.detach()[x0.flatten(0, 1)].requires_grad_()
        log_v = torch.zeros(x0.shape[:2], dtype=dtype, device=x0.device)
        r = tilt.checked(reward.of_embeddings(drawn, *context), len(drawn), drawn.device)
        estimate = tilt.average(r.view_as(log_v), log_v, tilt.kl)
        (slope,) = torch.autograd.grad(estimate.sum(), drawn)
    return estimate.detach(), slope.reshape(len(x0), -1, slope.shape[-1]).sum(0)


def _through_logits(
    denoiser: FromLogits | FromHidden, answer: Tensor, drawn: Tensor, rewarded: Tensor, sites: Tensor, x: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of the estimate in the network's `answer` (P·L, ...), through the distributions of draws, and the
    mean token gradient <mu, s>, (P·L,); both at the `sites` (k,), 0 elsewhere."""
    vocab_size, mask_id = len(rewarded), denoiser.mask_id
    through = torch.zeros_like(answer)
    expected = torch.zeros(len(x), dtype=torch.promote_types(drawn.dtype, torch.float32), device=x.device)
    rewarded, head = _aligned(rewarded), denoiser.head if isinstance(denoiser, FromHidden) else None
    weight, bias = (None, None) if head is None else (_aligned(head.weight.detach()), head.bias)
    bias = None if bias is None else _aligned(bias.detach())
    for part in torch.split(sites, max(1, TABLES // (2 * drawn.itemsize * vocab_size))):
        logits = answer[part] if weight is None else linear(answer[part], weight, bias)
        slope, mean = softmax_slope(logits, drawn[part] @ rewarded.T, vocab_size, mask_id)
        expected[part] = mean.to(expected.dtype)
        # At an open site the prediction is not read.
        open_site = (x[part] != mask_id).unsqueeze(-1)
        through[part] = (slope if weight is None else slope @ weight).masked_fill(open_site, 0.0)
    return through, expected


def _aligned(table: Tensor) -> Tensor:
    """A table (V, ...) padded with zeros: matrix products on a GPU are three times slower if V is odd."""
    missing = -len(table) % 64 if table.is_cuda else 0
    return torch.cat([table, table.new_zeros(missing, *table.shape[1:])]) if missing else table


class _Sites:
    """The sites of a mask (P, L) as indices (k,). On a GPU their number is copied to the host asynchronously."""

    def __init__(self, where: Tensor) -> None:
        self.where = where.flatten()
        if where.is_cuda and not capturing():
            self.count = self.where.sum().to("cpu", non_blocking=True)
            self.known = torch.cuda.current_stream(where.device).record_event()

    def __call__(self) -> Tensor:
        if not self.where.is_cuda:
            return self.where.nonzero().squeeze(-1)
        if capturing():  # their number is not known: all sites
            return torch.arange(len(self.where), device=self.where.device)
        self.known.synchronize()
        return self.where.byte().argsort(descending=True, stable=True)[: int(self.count)]
