"""What a denoiser must do, tried on one row when a model is made of it, so that what cannot work is said at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tokensteer.core.categorical.forms import Categorical
from tokensteer.core.categorical.sites import by_site
from tokensteer.core.kernels.kernel import NO_MASK, Clocked, Kernel
from tokensteer.core.kernels.noise import MaskNoise, noise_of
from tokensteer.core.models.denoiser import Denoiser, FromHidden, FromLogits, Structured, Timeless
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.particles.path import Step

RESTLESS = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)  # pyright: ignore[reportPrivateUsage]


def check_denoiser(
    denoiser: Denoiser, kernel: Kernel, steps: Sequence[Step], template: Tensor, x: Tensor, *, kept: bool
) -> tuple[int, torch.dtype]:
    """The size of a denoiser's vocabulary and its precision, seen at the start x (1, L) and half-way, or an error with
    its mend. `kept`: what it says is used again."""
    _check_mode(denoiser)
    likeliest, vocab_size, dtype = _look(denoiser, kernel, template, x, steps[0].t)
    half_open = halfway(x, kernel.mask_id, lambda where: likeliest[where])
    _look(denoiser, kernel, template, half_open, steps[len(steps) // 2].t)
    if kept:
        _check_memory(denoiser, kernel, x, half_open, likeliest, steps[0].t)
    _check_timeless(denoiser, half_open, steps)
    if isinstance(kernel, Clocked):
        _check_times(denoiser, half_open, dtype)
    return vocab_size, dtype


def _look(denoiser: Denoiser, kernel: Kernel, template: Tensor, x: Tensor, t: float) -> tuple[Tensor, int, torch.dtype]:
    """The likeliest tokens (1, L) at x, and what they are likeliest of: laws are large, and not kept."""
    answer = _answer(denoiser, x, t)
    _check_ids(kernel, template, answer.shape[-1])
    _check_law(answer, x, kernel)
    return answer.argmax(-1), answer.shape[-1], answer.dtype


def _check_mode(denoiser: Denoiser) -> None:
    """Networks with dropout, or norms over a batch, are other functions while they train."""
    known = (denoiser, *(getattr(denoiser, name, None) for name in ("network", "trunk")))
    nets = [net for net in known if isinstance(net, nn.Module)]
    layers = [layer for net in nets for layer in net.modules() if isinstance(layer, RESTLESS) and layer.training]
    if any(getattr(layer, "p", 1.0) > 0 for layer in layers):  # dropout may be turned off
        warnings.warn(
            "the denoiser's network is in training mode and has dropout or batch norm: it does not say the same twice. "
            "Call .eval()",
            stacklevel=5,
        )


@torch.no_grad()
def _check_memory(denoiser: Denoiser, kernel: Kernel, x: Tensor, other: Tensor, tokens: Tensor, t: float) -> None:
    """What was said of x (1, L), here of the `tokens` (1, L), stays what it was as another state is asked about."""

    def laws(x: Tensor) -> Categorical:
        if isinstance(denoiser, Structured) and kernel.mask_id != NO_MASK:
            return denoiser.laws(x, t)
        return by_site(denoiser(x, t)).store

    said, sites = laws(x), torch.arange(x.shape[1], device=x.device)
    before = said.entries(sites, tokens[0])
    laws(other)
    if not torch.allclose(said.entries(sites, tokens[0]), before, equal_nan=True):
        raise ValueError(
            "the denoiser's network writes all its answers into the same memory, so that what it said of one state is "
            "lost when it is asked about another: let it return a new tensor, or answer.clone()"
        )


@torch.no_grad()
def _check_timeless(denoiser: Denoiser, x: Tensor, steps: Sequence[Step]) -> None:
    """A denoiser of one's own that says it ignores the time may be wrong about it; from_logits sees to it."""
    if isinstance(denoiser, FromLogits | FromHidden) or not _says_it_ignores_time(denoiser):
        return
    times = steps[0].t, steps[len(steps) // 2].t
    early, late = (denoiser(x, t).exp() for t in times)
    if not torch.allclose(early, late, atol=1e-3, equal_nan=True):
        raise ValueError(
            f"the denoiser says that it ignores the time, and answers one thing at t = {times[0]:.3g} and another at "
            f"t = {times[1]:.3g}: let ignores_time be False"
        )


def _says_it_ignores_time(denoiser: object) -> bool:
    return isinstance(denoiser, Timeless) and denoiser.ignores_time


def _check_times(denoiser: Denoiser, x: Tensor, dtype: torch.dtype) -> None:
    """Two rows at two times must be answered as they are one by one."""
    times = (0.75, 0.25)
    with torch.no_grad():
        apart = torch.cat([denoiser(x, t) for t in times])
        try:
            together = denoiser(x.repeat(2, 1), torch.tensor(times, dtype=dtype, device=x.device))
        except Exception as error:
            raise ValueError(
                f"the denoiser fails with a time for each row, t of shape (P,): {error}. Particles have clocks of "
                "their own here: let it take such a t, or use a kernel with one time for all, such as Ancestral"
            ) from error
    if together.shape != apart.shape or not torch.allclose(together.exp(), apart.exp(), atol=1e-3):
        raise ValueError(
            "the denoiser answers wrongly with a time for each row, t of shape (P,): row i must be answered as at t[i] "
            "alone. Is t broadcast along the wrong axis? Use t.view(-1, 1, 1)"
        )


def halfway(x: Tensor, mask_id: int, likeliest: Callable[[Tensor], Tensor]) -> Tensor:
    """x with its likeliest tokens, which are asked for where they are wanted, at every other masked site."""
    every_other = torch.arange(x.shape[-1], device=x.device) % 2 == 0
    where = (x == mask_id) & every_other
    return x.masked_scatter(where, likeliest(where))


def counted(x: Tensor) -> Tensor:
    """A copy whose writes torch counts, in x._version; those to tensors made in inference mode it does not."""
    with torch.inference_mode(False):
        return x.clone()


def _answer(denoiser: Denoiser, x: Tensor, t: float) -> Tensor:
    """log p(x_0 | x_t) for one row, (1, L, V)."""
    length = x.shape[1]
    try:
        with torch.no_grad():
            x = counted(x)
            written = x._version
            answer = denoiser(x, t)
    except Exception as error:
        raise ValueError(
            f"the denoiser fails on a template of length {length}: {error}. If the model is shorter than that, "
            "shorten the template. A network that takes no time is wrapped as from_logits(network, mask_id, "
            "ignores_time=True), and called as network(x); without the flag it is called as network(x, t)"
        ) from error
    if x._version != written:
        raise ValueError("the denoiser writes to the sequences it is given, which are the particles: let it clone them")
    if answer.dim() != 3 or tuple(answer.shape[:2]) != (1, length) or not answer.shape[-1]:
        raise ValueError(
            f"the denoiser must answer (1, {length}, V) for a template of length {length}, got "
            f"{tuple(answer.shape)}: is the template longer than the model?"
        )
    return answer


def _check_ids(kernel: Kernel, template: Tensor, vocab_size: int) -> None:
    """The mask and the template are of the denoiser's words."""
    mask_id, has_mask = kernel.mask_id, isinstance(noise_of(kernel), MaskNoise)
    if has_mask and not 0 <= mask_id < vocab_size:
        raise ValueError(
            f"mask_id {mask_id} is outside the vocabulary of {vocab_size}: the mask must be one of the denoiser's "
            "entries; add a column for it"
        )
    if int(template.max()) >= vocab_size or int(template.min()) < (0 if has_mask else NO_MASK):
        raise ValueError(f"the template holds ids outside 0..{vocab_size - 1}, the denoiser's vocabulary")


def _check_law(answer: Tensor, x: Tensor, kernel: Kernel) -> None:
    """The answer is a law of tokens at the sites that are read."""
    mask_id, has_mask = kernel.mask_id, isinstance(noise_of(kernel), MaskNoise)
    if answer.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"the denoiser must answer in float32 or float64, got {answer.dtype}: wrap it in from_logits")
    read = (x == mask_id) if has_mask else torch.ones_like(x, dtype=torch.bool)
    total = by_site(answer).mass(read)
    if total.isnan().any():
        raise ValueError("the denoiser gives NaN at masked sites of the template: check its weights and inputs")
    if has_mask and (answer[..., mask_id][read] > NEVER).any():
        raise ValueError(
            f"the denoiser gives mass to the mask token {mask_id}: its log-probability there must be -inf. Wrap raw "
            "logits as from_logits(network, mask_id)"
        )
    if (total.abs() > 1e-3).any():
        raise ValueError(
            "the denoiser's probabilities do not sum to one: it must give log-probabilities. Wrap raw logits as "
            "from_logits(network, mask_id)"
        )
