"""The gradient of the reward's estimate in x_t, computed in the same pass as the prediction.

Uses embeddings when the denoiser and the reward expose them (`straight_through`), else one-hots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from tokensteer.core.categorical.forms import CategoricalStore, LogProbs, StoreBuffer
from tokensteer.core.models.context import Query
from tokensteer.core.models.denoiser import Time
from tokensteer.core.models.diffusion import Diffusion, Model, distinct_rows, located, predict_all
from tokensteer.core.models.prediction import Prediction, all_distinct, changed, updated
from tokensteer.core.numerics.batching import ran_out
from tokensteer.core.numerics.draws import uniforms_at
from tokensteer.core.twists.estimators import NoisyState, Relaxed, Sampled, hidden_sites
from tokensteer.core.twists.straight_through import straight_through, takes_embeddings
from tokensteer.core.twists.tilt import Tilt


class Fresh(NamedTuple):
    """Estimates of the reward made at this step, (n,), and the particles they belong to, (n,)."""

    rows: Tensor
    estimates: Tensor


def predict_with_gradient(
    model: Model,
    twist: Tilt,
    x: Tensor,
    t: float,
    time: Time,
    generator: Generator | None,
    before: Prediction | None,
    gradient_before: Prediction | None,
) -> tuple[Prediction, Prediction, Fresh]:
    """The prediction and the gradient at x (P, L), and the estimates that came with them.

    One forward and one backward pass for the particles that have moved since `before` and `gradient_before`, those of
    their parents; for all particles if one of these is None.
    """
    new, length = changed(x, before, gradient_before), x.shape[1]
    # Equal states share their gradient only if it is not random: independent noise averages out, shared noise does not.
    query = located(model.networks, time, x, twist.populations)
    news = all_distinct(new) if twist.estimator.random else distinct_rows(x, new, query, model.networks)
    if gradient_before is not None and not len(new):
        nothing = torch.zeros(0, dtype=torch.float64, device=x.device)
        return predict_all(model.networks, x, query, before, news), gradient_before, Fresh(new, nothing)
    # A guess of bytes a row: activations kept for the backward pass, or with one-hots all (L, V) tables.
    embeds = takes_embeddings(model, twist)
    per_row = 4 * length * model.vocab_size * (2 if embeds else 8 + 6 * twist.draws)
    states = x[news.distinct]
    queries = query.take(news.distinct)
    predicted, gradients = StoreBuffer(states.numel()), StoreBuffer(states.numel())
    noise = None
    if isinstance(twist.estimator, Sampled | Relaxed) and twist.estimator.random:
        # Drawn for all rows at once, so that samples do not depend on how rows are cut into chunks.
        noise = uniforms_at(hidden_sites(states, model.kernel.mask_id), twist.draws, generator)

    def differentiate(rows: slice) -> Tensor:
        drawn = None if noise is None else noise[rows]
        store, estimate, gradient = _differentiate(model, twist, states[rows], t, queries.take(rows), drawn, generator)
        predicted.put(rows.start * length, store, states[rows].numel())
        gradients.put(rows.start * length, gradient, states[rows].numel())
        return estimate

    estimates = model.base.chunks.stretches(differentiate, len(states), per_row, x.device, generator, backward=True)
    if embeds:  # otherwise `Tilt.exact` counts them
        twist.meter.count(twist.draws * len(states))
    prediction = predict_all(model.networks, x, query, before, news, (predicted.store,))
    gradient = updated(x, news, (gradients.store,), gradient_before)
    return prediction, gradient, Fresh(new, torch.cat(estimates)[news.which])


def _differentiate(
    model: Model, twist: Tilt, x: Tensor, t: float, query: Query, noise: Tensor | None, generator: Generator | None
) -> tuple[CategoricalStore, Tensor, CategoricalStore]:
    """The prediction, the estimate of the reward and its gradient in x_t."""
    if isinstance(model, Diffusion) and takes_embeddings(model, twist):
        movable = (x == model.kernel.mask_id) | any(model.kernel.remasks(step) for step in model.steps)
        context = model.given(query, len(x))
        return straight_through(model, twist, x, t, movable, generator, noise, context, query.of)
    with torch.inference_mode(False), torch.enable_grad():
        one_hots = one_hot(x, model.vocab_size).to(model.dtype).requires_grad_()
        log_x0 = _relaxed(model, one_hots, query)
        state = NoisyState(one_hots, log_x0, t, model.kernel.mask_id, noise, query.of)
        estimate = twist.estimate(state, generator)
        gradient = LogProbs(_gradient(estimate, one_hots).flatten(0, 1).contiguous())
        return LogProbs(log_x0.detach().flatten(0, 1).contiguous()), estimate.detach(), gradient


def _relaxed(model: Model, x: Tensor, query: Query) -> Tensor:
    """The prediction from one-hots (P, L, V)."""
    try:
        return model.relaxed(x, query)
    except (RuntimeError, TypeError, IndexError) as error:
        if ran_out(error):
            raise
        raise ValueError(
            f"for a gradient the denoiser is given one-hots (P, L, V) instead of ids, and fails on them: {error}. "
            "Let its network take them, enter it behind its embedding layer, adapters.module(net, net.embedding, "
            "mask_id), or use a proposal without gradients"
        ) from error


def _gradient(estimate: Tensor, x: Tensor) -> Tensor:
    if not estimate.requires_grad:
        raise ValueError(
            "the estimate of the reward does not depend on x_t in a way that can be differentiated: let the denoiser "
            "or Value function take one-hots, or use a proposal without gradients"
        )
    return torch.autograd.grad(estimate.sum(), x)[0]
