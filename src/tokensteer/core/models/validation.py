"""Checks of a denoiser on one row when a model is constructed, so that a network that cannot work raises at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from tokensteer.core.categorical.forms import Categorical
from tokensteer.core.categorical.sites import by_site
from tokensteer.core.kernels.kernel import NO_MASK, Clocked, Kernel
from tokensteer.core.kernels.noise import Interpolating, MaskNoise, noise_of
from tokensteer.core.models.context import Context, context_rows
from tokensteer.core.models.denoiser import Denoiser, FromHidden, FromLogits, Structured, ignores_time
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.particles.path import Step

Found = TypeVar("Found")

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
MOST_ROUNDING = 0.05  # of a probability
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def check_denoiser(
    denoiser: Denoiser,
    kernel: Kernel,
    steps: Sequence[Step],
    template: Tensor,
    x: Tensor,
    context: Context = (),
    *,
    kept: bool,
) -> tuple[int, torch.dtype]:
    """The vocabulary size and the precision of a denoiser, checked at the start x (1, L) and at a half-open state.

    `kept`: predictions are stored and read again later, so the network must not reuse their memory.
    """
    _check_mode(denoiser)
    first = tuple(part[:1] for part in context)
    log_x0 = _predict(denoiser, kernel, template, x, steps[0].t, first)
    likeliest, vocab_size, dtype = log_x0.argmax(-1), log_x0.shape[-1], log_x0.dtype
    del log_x0  # it is large
    half_open = halfway(x, kernel.mask_id, lambda where: likeliest[where])
    _predict(denoiser, kernel, template, half_open, steps[len(steps) // 2].t, first)
    if kept:
        _check_memory(denoiser, kernel, x, half_open, likeliest, steps[0].t, first)
    _check_timeless(denoiser, half_open, steps, first)
    if isinstance(kernel, Clocked):
        _check_times(denoiser, half_open, dtype, first)
    if context and len(context[0]) > 1:
        _check_contexts(denoiser, half_open, steps[0].t, context)
    return vocab_size, dtype


def check_shape(template: Tensor, steps: Sequence[Step], kernel: Kernel) -> None:
    """The template is made of ids and the steps run down to 0."""
    given, listed = cast("object", template), cast("object", steps)
    if not isinstance(given, Tensor) or given.dtype != torch.int64 or given.dim() not in (1, 2):
        raise ValueError(f"template must be a tensor of int64 ids, (L,) or (B, L), got {_describe(given)}")
    if not template.numel():
        raise ValueError(f"template has no site, its shape is {tuple(template.shape)}: give it one or more")
    parts = cast("Sequence[object]", listed) if isinstance(listed, Sequence) else [None]
    if not all(isinstance(step, Step) for step in parts):
        raise TypeError(f"steps must be a list of steps, got {steps!r}: uniform_steps(n) makes n of them")
    times = [step.t for step in steps] + [steps[-1].s] if steps else []
    joined = all(step.s == after.t for step, after in pairwise(steps))
    if not times or not joined or times != sorted(times, reverse=True) or times[-1] != 0:
        raise ValueError("steps must run down to t = 0 without a gap: use uniform_steps(n) or cosine_steps(n)")
    if isinstance(kernel, Interpolating) and int(template.max()) >= len(kernel.prior):
        raise ValueError(f"the template holds ids outside the prior, which is over {len(kernel.prior)} tokens")


def halfway(x: Tensor, mask_id: int, likeliest: Callable[[Tensor], Tensor]) -> Tensor:
    """x with every other masked site opened; `likeliest` returns the tokens for a mask (P, L) of sites."""
    every_other = torch.arange(x.shape[-1], device=x.device) % 2 == 0
    where = (x == mask_id) & every_other
    return x.masked_scatter(where, likeliest(where))


def unwritten(what: str, function: Callable[[Tensor], Found], x: Tensor) -> Found:
    """function(x); raises if the function writes to x. Torch counts no writes to tensors made in inference mode."""
    version = None if x.is_inference() else x._version
    found = function(x)
    if version is not None and x._version != version:
        raise ValueError(f"{what} writes to the sequences it is given, which are the particles: let it clone them")
    return found


def copied(x: Tensor) -> Tensor:
    """A copy to which writes are counted, in inference mode too."""
    with torch.inference_mode(False):
        return x.clone()


def check_log_probs(log_x0: Tensor, x: Tensor, kernel: Kernel, tolerance: float = 1e-3) -> None:
    """Raise unless log_x0 (P, L, V) are log-probabilities, -inf at the mask, at the masked sites of x (all sites for a
    process without a mask)."""
    mask_id, has_mask = kernel.mask_id, isinstance(noise_of(kernel), MaskNoise)
    if log_x0.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"the denoiser must return float32 or float64, got {log_x0.dtype}: wrap it in from_logits")
    read = (x == mask_id) if has_mask else torch.ones_like(x, dtype=torch.bool)
    log_sum = by_site(log_x0).mass(read).abs()
    if log_sum.isnan().any():
        raise ValueError("the denoiser gives NaN at masked sites: check its weights and inputs")
    if has_mask and (log_x0[..., mask_id][read] > NEVER).any():
        mass = float(log_x0[..., mask_id][read].exp().max())
        raise ValueError(
            f"the denoiser gives mass {mass:.2g} to the mask token {mask_id}: its log-probability there must be -inf. "
            "Wrap raw logits as from_logits(network, mask_id)"
        )
    if (log_sum > tolerance).any():
        raise ValueError(
            f"the denoiser's probabilities do not sum to one: the log of the sum is off by {float(log_sum.max()):.2g}, "
            "and it must return log-probabilities. Wrap raw logits as from_logits(network, mask_id)"
        )


def _predict(denoiser: Denoiser, kernel: Kernel, template: Tensor, x: Tensor, t: float, context: Context) -> Tensor:
    """log p(x_0 | x_t) for one row, (1, L, V), checked."""
    length = x.shape[1]

    def call(x: Tensor) -> Tensor:
        try:
            return denoiser(x, t, *context)
        except Exception as error:
            more = ", context" if context else ""
            raise ValueError(
                f"the denoiser fails on a template of length {length}: {error}. If the model is shorter than that, "
                "shorten the template. A network that takes no time is wrapped as from_logits(network, mask_id, "
                f"ignores_time=True), and called as network(x{more}); without the flag it is called as "
                f"network(x, t{more})"
            ) from error

    with torch.no_grad():
        log_x0 = unwritten("the denoiser", call, copied(x))
    if log_x0.dim() != 3 or tuple(log_x0.shape[:2]) != (1, length) or not log_x0.shape[-1]:
        raise ValueError(
            f"the denoiser must return (1, {length}, V) for a template of length {length}, got "
            f"{tuple(log_x0.shape)}: is the template longer than the model?"
        )
    _check_ids(kernel, template, log_x0.shape[-1])
    check_log_probs(log_x0, x, kernel)
    return log_x0


def _check_ids(kernel: Kernel, template: Tensor, vocab_size: int) -> None:
    """The mask and the template lie in the vocabulary."""
    mask_id, has_mask = kernel.mask_id, isinstance(noise_of(kernel), MaskNoise)
    if has_mask and not 0 <= mask_id < vocab_size:
        raise ValueError(
            f"mask_id {mask_id} is outside the vocabulary of {vocab_size}: the mask must be one of the denoiser's "
            "entries; add a column for it"
        )
    if int(template.max()) >= vocab_size or int(template.min()) < (0 if has_mask else NO_MASK):
        raise ValueError(f"the template holds ids outside 0..{vocab_size - 1}, the denoiser's vocabulary")


def _check_mode(denoiser: Denoiser) -> None:
    """Warn about dropout and batch norm in training mode."""
    known = (denoiser, *(getattr(denoiser, name, None) for name in ("network", "trunk")))
    layers = [layer for net in known if isinstance(net, nn.Module) for layer in net.modules()]
    training = [layer for layer in layers if isinstance(layer, DROPOUT + BATCH_NORM) and layer.training]
    if any(getattr(layer, "p", 1.0) > 0 for layer in training):  # dropout with p = 0 does nothing
        warnings.warn(
            "the denoiser's network is in training mode and has dropout or batch norm: two calls on the same input "
            "differ. Call .eval()",
            stacklevel=5,
        )


@torch.no_grad()
def _check_memory(
    denoiser: Denoiser, kernel: Kernel, x: Tensor, other: Tensor, tokens: Tensor, t: float, context: Context
) -> None:
    """The prediction at x (1, L), read at `tokens` (1, L), is unchanged after a call at another state."""

    def predict(x: Tensor) -> Categorical:
        if isinstance(denoiser, Structured) and kernel.mask_id != NO_MASK:
            return denoiser.laws(x, t, *context)
        return by_site(denoiser(x, t, *context)).store

    prediction, sites = predict(x), torch.arange(x.shape[1], device=x.device)
    before = prediction.entries(sites, tokens[0])
    predict(other)
    if not torch.allclose(prediction.entries(sites, tokens[0]), before, equal_nan=True):
        raise ValueError(
            "the denoiser's network writes all its outputs into the same memory, so a call overwrites the prediction "
            "of the call before: let it return a new tensor, or output.clone()"
        )


@torch.no_grad()
def _check_timeless(denoiser: Denoiser, x: Tensor, steps: Sequence[Step], context: Context) -> None:
    """A denoiser with ignores_time = True does ignore the time; `from_logits` and `from_hidden` ensure it."""
    if isinstance(denoiser, FromLogits | FromHidden) or not ignores_time(denoiser):
        return
    times = steps[0].t, steps[len(steps) // 2].t
    early, late = (denoiser(x, t, *context).exp() for t in times)
    if not torch.allclose(early, late, atol=1e-3, equal_nan=True):
        raise ValueError(
            f"the denoiser declares that it ignores the time, and its outputs at t = {times[0]:.3g} and "
            f"t = {times[1]:.3g} differ: let ignores_time be False"
        )


@torch.no_grad()
def _check_times(denoiser: Denoiser, x: Tensor, dtype: torch.dtype, context: Context) -> None:
    """Two rows at two times in one call give what two calls give."""
    times = (0.75, 0.25)
    apart = torch.cat([denoiser(x, t, *context) for t in times])
    try:
        both = context_rows(context, None, 2)
        together = denoiser(x.repeat(2, 1), torch.tensor(times, dtype=dtype, device=x.device), *both)
    except Exception as error:
        raise ValueError(
            f"the denoiser fails with a time for each row, t of shape (P,): {error}. Each particle has its own time "
            "with this kernel: let the denoiser take such a t, or use a kernel with one time for all, such as Ancestral"
        ) from error
    if not _agree(together, apart, _rounding(denoiser, x, times[0], context)):
        raise ValueError(
            "the denoiser is wrong with a time for each row, t of shape (P,): row i must be predicted as with t[i] "
            "alone. Is t broadcast along the wrong axis? Use t.view(-1, 1, 1)"
        )


@torch.no_grad()
def _check_contexts(denoiser: Denoiser, x: Tensor, t: float, context: Context) -> None:
    """Two rows with two contexts in one call give what two calls give."""
    apart = torch.cat([denoiser(x, t, *(part[k : k + 1] for part in context)) for k in range(2)])
    together = denoiser(x.repeat(2, 1), t, *(part[:2] for part in context))
    if not _agree(together, apart, _rounding(denoiser, x, t, tuple(part[:1] for part in context))):
        raise ValueError(
            "the denoiser is wrong with a context for each row: row i must be predicted as with context[i] alone. Is "
            "the context broadcast along the wrong axis, or read from the first row only?"
        )


def _rounding(denoiser: Denoiser, x: Tensor, t: float, context: Context) -> float:
    """How far probabilities of a row and of the same row beside its copy are apart. A GPU may compute another number of
    rows by another kernel, and in half precision that shows."""
    once, twice = denoiser(x, t, *context), denoiser(x.repeat(2, 1), t, *context_rows(context, None, 2))
    return float((twice.exp() - once.exp()).abs().nan_to_num().max()) if twice.shape[1:] == once.shape[1:] else 0.0


def _agree(found: Tensor, expected: Tensor, rounding: float) -> bool:
    """Whether log-probabilities of two rows are the same but for rounding. Where that shows it varies from row to row,
    so it is compared with how far the two rows are apart: a wrong axis, or one row for both, changes half of that."""
    if found.shape != expected.shape:
        return False
    p, q = found.exp(), expected.exp()
    if torch.allclose(p, q, atol=min(1e-3 + 4 * rounding, MOST_ROUNDING), equal_nan=True):
        return True
    error, apart = (p - q).abs().nan_to_num().mean(), (q[0] - q[1]).abs().nan_to_num().mean()
    return rounding > 1e-4 and bool(error < apart / 8)


def _describe(x: object) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape)}"
