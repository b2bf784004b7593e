"""Straight-through gradients without one-hots, for networks that can be entered behind their embeddings.

The gradient of an estimate in the one-hots of x_t needs no one-hot anywhere: a draw x_0 is looked up in the reward's
embedding, and the gradient there times that embedding is what each token of x_0 is worth, s = g·E^T. It reaches x_t
directly, since what is drawn at a site has the law mu(x) = x[tokens] + x[mask]·mu there, and through the denoiser,
whose logits get mu·(s - <mu, s>). Only the sites that may move are spelt out over the vocabulary, once, whatever the
number of draws. The numbers are those of `Sampled` on one-hots.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Generator, Tensor

from tokensteer.core.denoiser import FromHidden, FromLogits
from tokensteer.core.kernel import NO_MASK
from tokensteer.core.model import Diffusion, Model
from tokensteer.core.tokens import Store, Tokens, log_law
from tokensteer.core.twist import Look, Sampled, Tilt, draw_clean


@runtime_checkable
class Embedded(Protocol):
    """A network whose first layer is an embedding (V, d), and what it makes of embedded tokens (P, L, d)."""

    @property
    def embedding(self) -> Tensor: ...
    def of_embeddings(self, embedded: Tensor) -> Tensor: ...


def can_enter(model: Model, tilt: Tilt) -> bool:
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
    model: Diffusion, tilt: Tilt, x: Tensor, t: float, where: Tensor, generator: Generator | None
) -> tuple[Store, Tensor, Tensor]:
    """The laws at x (P, L), the estimate of the reward (P,) and its gradient (P, L, V) at the sites `where` (P, L)."""
    denoiser, network, reward = model.denoiser, _network(model), tilt.reward
    assert isinstance(denoiser, FromLogits | FromHidden)
    assert network is not None
    assert isinstance(reward, Embedded)
    mask_id = model.kernel.mask_id
    with torch.enable_grad():
        entered = network.embedding.detach()[x].requires_grad_()
        answer = network.of_embeddings(entered)
        logits = denoiser.logits_at(answer, where)
    store = denoiser.kept(answer.detach())
    index = torch.arange(x.numel(), device=x.device).view_as(x)
    x0 = draw_clean(Look(x, Tokens(store, index), t, mask_id), tilt.draws, generator)
    with torch.enable_grad():
        drawn = reward.embedding.detach()[x0.flatten(0, 1)].requires_grad_()
        log_v = torch.zeros(x0.shape[:2], dtype=store.dtype, device=x.device)
        r = tilt.checked(reward.of_embeddings(drawn), len(drawn))
        estimate = tilt.average(r.view_as(log_v), log_v, tilt.kl)
        (slope_of_drawn,) = torch.autograd.grad(estimate.sum(), drawn)
    worth = slope_of_drawn.view(*x0.shape, -1).sum(0)[where] @ reward.embedding.detach().T
    mu = log_law(logits.detach(), mask_id).exp().to(worth.dtype)
    expected = (mu * worth).sum(-1, keepdim=True)
    # At an open site the prediction is not read, so only what is drawn there matters.
    through = torch.where((x == mask_id)[where].unsqueeze(-1), mu * (worth - expected), 0.0)
    (slope,) = torch.autograd.grad(logits, entered, through.to(logits.dtype))
    worth[:, mask_id] = expected.squeeze(-1)
    gradient = worth + slope[where] @ network.embedding.detach().T
    whole = torch.zeros(*x.shape, gradient.shape[-1], dtype=gradient.dtype, device=x.device)
    return store, tilt.hopeful(estimate.detach()), whole.index_put(where.nonzero(as_tuple=True), gradient)
