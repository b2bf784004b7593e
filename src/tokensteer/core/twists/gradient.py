"""The gradient of the reward's estimate in x_t, which comes out of the same pass as the prediction.

Networks that can be entered behind their embeddings are (`embedded`); the others are given one-hots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from tokensteer.core.categorical.forms import CategoricalStore, LogProbs, StoreBuffer
from tokensteer.core.models.denoiser import Time
from tokensteer.core.models.diffusion import Diffusion, Model, distinct_rows
from tokensteer.core.models.prediction import Prediction, changed, each_apart, updated
from tokensteer.core.numerics.batching import ran_out
from tokensteer.core.numerics.draws import uniforms_at
from tokensteer.core.twists.estimators import NoisyState, Relaxed, Sampled, hidden_sites
from tokensteer.core.twists.straight_through import straight_through, takes_embeddings
from tokensteer.core.twists.tilt import Tilt


class Fresh(NamedTuple):
    """Estimates of the reward that were just made, (n,), and of which particles, (n,)."""

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
    slopes: Prediction | None,
) -> tuple[Prediction, Prediction, Fresh]:
    """One pass forward and one back for the particles that have moved since `before` and `slopes`, the prediction and
    the gradient of their parents, if these hold: the two of x (P, L), and the estimates that came with them."""
    new = changed(x, before, slopes)
    if before is not None and slopes is not None and not len(new):
        for network in model.networks:
            network.meter.count(0, len(x))
        return before, slopes, Fresh(new, torch.zeros(0, dtype=torch.float64, device=x.device))
    # Twins share their gradient only if it is not random: independent noise averages out, shared noise does not.
    news = each_apart(new) if twist.estimator.random else distinct_rows(x, new, time, model.networks)
    # A guess: what networks keep for their way back, or all there is with one-hots.
    entered = takes_embeddings(model, twist)
    copies = 2 if entered else 8 + 6 * twist.draws
    per_row = 4 * x.shape[1] * model.vocab_size * copies
    asked, said, sloping = (
        x[news.asked],
        StoreBuffer(x.shape[1] * len(news.asked)),
        StoreBuffer(x.shape[1] * len(news.asked)),
    )
    asked_at = time[news.asked] if isinstance(time, Tensor) else time

    noise = None
    if isinstance(twist.estimator, Sampled | Relaxed) and twist.estimator.random:
        noise = uniforms_at(hidden_sites(asked, model.kernel.mask_id), twist.draws, generator)

    def differentiate(rows: slice) -> Tensor:
        some, when = asked[rows], asked_at[rows] if isinstance(asked_at, Tensor) else asked_at
        drawn = None if noise is None else noise[rows]
        store, estimate, slope = _differentiate(model, twist, some, t, when, drawn, generator)
        said.put(rows.start * x.shape[1], store, some.numel())
        sloping.put(rows.start * x.shape[1], slope, some.numel())
        return estimate

    estimates = model.base.chunks.stretches(differentiate, len(asked), per_row, x.device, generator)
    if entered:  # otherwise estimates are counted as they are made
        twist.meter.count(twist.draws * len(asked))
    prediction = model.differentiated(x, time, news, said.store, before)
    gradient = updated(x, news, (sloping.store,), slopes)
    return prediction, gradient, Fresh(new, torch.cat(estimates)[news.which])


def _differentiate(
    model: Model, twist: Tilt, x: Tensor, t: float, time: Time, noise: Tensor | None, generator: Generator | None
) -> tuple[CategoricalStore, Tensor, CategoricalStore]:
    """The prediction, the estimate of the reward and its gradient in x_t."""
    if isinstance(model, Diffusion) and takes_embeddings(model, twist):
        movable = (x == model.kernel.mask_id) | any(model.kernel.remasks(step) for step in model.steps)
        return straight_through(model, twist, x, t, movable, generator, noise)
    with torch.inference_mode(False), torch.enable_grad():
        seen = one_hot(x, model.vocab_size).to(model.dtype).requires_grad_()
        log_x0 = _relaxed(model, seen, time)
        estimate = twist.estimate(NoisyState(seen, log_x0, t, model.kernel.mask_id, noise), generator)
        slopes = LogProbs(_gradient(estimate, seen).flatten(0, 1).contiguous())
        return LogProbs(log_x0.detach().flatten(0, 1).contiguous()), estimate.detach(), slopes


def _relaxed(model: Model, x: Tensor, t: Time) -> Tensor:
    """The prediction from one-hots (P, L, V)."""
    try:
        return model.relaxed(x, t)
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
