"""Assertions for a user's own denoiser, reward and resampler; `measures` has those for kernels and proposals.

Each checks what the theory needs and raises an AssertionError with what is broken and how to mend it. Equalities hold
up to 1e-4 in float32 and 1e-8 in float64; draws are compared with log-probabilities by z-scores. Random numbers come
from a generator with `seed`; torch's global generator is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Generator as Yields
from contextlib import contextmanager
from functools import partial

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from tokensteer.core.models.context import Query
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.validation import check_log_probs, copied, unwritten
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.particles.resampling import Resampler
from tokensteer.core.twists.tilt import Reward, Tilt

DRAWS = 20_000
LARGEST_Z = 5.0


def demand(holds: bool, broken: str, mend: str) -> None:
    if not holds:
        raise AssertionError(f"{broken}. {mend}.")


@contextmanager
def _as_assertions() -> Yields[None]:
    """Raise the ValueErrors of the library's own checks as AssertionErrors."""
    try:
        yield
    except ValueError as error:
        raise AssertionError(str(error)) from error


def tolerance_for(dtype: torch.dtype) -> float:
    return 1e-8 if dtype == torch.float64 else 1e-4


def gap_of(a: Tensor, b: Tensor) -> float:
    """max over rows of sum |a - b| / (1 + |a|) over the last axis; equal infinities are equal, NaN equals nothing."""
    apart = torch.where((a - b).isfinite(), (a - b).abs() / (1.0 + a.abs()), torch.inf)
    return float(torch.where(a == b, 0.0, apart).double().sum(-1).max())


def random_tokens(shape: tuple[int, ...], vocab_size: int, mask_id: int | None, generator: Generator) -> Tensor:
    """Uniform ids, never the mask."""
    ids = torch.randint(vocab_size - (mask_id is not None), shape, generator=generator, device=generator.device)
    return ids if mask_id is None else ids + (ids >= mask_id)


def partly_masked(canvas: Tensor, vocab_size: int, mask_id: int, generator: Generator) -> Tensor:
    """Random tokens at a share of the masked sites, from none in the first row to most in the last."""
    shares = torch.linspace(0.0, 1.0, len(canvas) + 1, device=canvas.device)[:-1].unsqueeze(-1)
    opens = torch.rand(canvas.shape, generator=generator, device=canvas.device) < shares
    tokens = random_tokens(tuple(canvas.shape), vocab_size, mask_id, generator)
    return torch.where(opens & (canvas == mask_id), tokens, canvas)


def _assert_function(
    what: str, f: Callable[[Tensor], Tensor], ids: Tensor, vocab_size: int | None, tol: float, generator: Generator
) -> None:
    """f (P, ..., K) is deterministic and computes each row by itself; with a `vocab_size` it also takes one-hots, with
    the same values and a gradient."""
    with torch.no_grad(), _as_assertions():
        first, again = unwritten(what, f, copied(ids)), f(ids)
        alone = torch.cat([f(row) for row in torch.split(ids, 1)])
        order = torch.randperm(len(ids), generator=generator, device=ids.device)
        permuted = f(ids[order])
    gap, mend = gap_of(first, again), "Call network.eval() to turn dropout off, and draw no random numbers inside"
    demand(gap <= tol, f"{what} is not deterministic: two calls on the same input differ by {gap:.2g}", mend)
    gap = max(gap_of(first, alone), gap_of(first[order], permuted))
    mend = "Look for batch norm (call network.eval()) and for attention, sums or statistics across rows"
    demand(gap <= tol, f"{what} mixes rows: the rest of the batch changes its value by {gap:.2g}", mend)
    if vocab_size is None:
        return
    x = one_hot(ids, vocab_size).to(first.dtype).requires_grad_()
    mend = "Embed floating-point input as x @ embedding.weight, or do without gradients"
    try:
        with torch.enable_grad():
            soft = f(x)
    except Exception as error:
        raise AssertionError(f"{what} fails on one-hots (P, L, V): {error}. {mend}.") from error
    gap = gap_of(first, soft.detach())
    demand(gap <= tol, f"{what} differs between ids and their one-hots by {gap:.2g}", mend)
    seen = soft[first > NEVER]
    total = (seen * torch.randn(seen.shape, generator=generator, device=seen.device, dtype=seen.dtype)).sum()
    gradient = torch.zeros_like(x)
    if total.requires_grad:
        gradient = torch.autograd.grad(total, x, materialize_grads=True)[0]
    mend = "Look for log, sqrt or division at 0, and keep them out of the graph with a `where` on their input"
    demand(bool(gradient.isfinite().all()), f"{what} has a gradient in its one-hots that is not finite", mend)
    mend = "Look for argmax, rounding, detach() or no_grad() on the way; if all rewards are -inf, use more rows"
    demand(bool(gradient.any()), f"{what} has a gradient in its one-hots that is zero everywhere", mend)


def assert_denoiser(
    model: Diffusion, *, one_hots: bool = True, rows: int = 8, tolerance: float | None = None, seed: int = 0
) -> None:
    """The denoiser returns log p(x_0 | x_t): normalised at masked sites, -inf at the mask, each row by itself.

    With `one_hots` it also takes them in place of ids, with a gradient. States are the template with random tokens at
    some free sites. Networks in half precision need a larger `tolerance`.
    """
    generator, mask_id = torch.Generator(model.device).manual_seed(seed), model.kernel.mask_id
    templates = model.template.reshape(-1, model.template.shape[-1])
    canvas = templates[torch.arange(rows, device=model.device) % len(templates)]
    x = partly_masked(canvas, model.vocab_size, mask_id, generator)
    tol = tolerance_for(model.dtype) if tolerance is None else tolerance

    def log_x0(x: Tensor, t: float) -> Tensor:
        first = Query(t, torch.zeros(len(x), dtype=torch.int64, device=x.device))  # rows in any order share a context
        found, shape = model.denoiser(x, t, *model.given(first, len(x))), (*x.shape[:2], model.vocab_size)
        got = f"the denoiser gives {found.dtype} of shape {tuple(found.shape)} at t = {t:.4g} for {len(x)} sequences"
        mend = f"It must give {model.dtype} of shape {shape} for any batch: squeeze nothing, and keep one precision"
        demand(found.shape == shape and found.dtype == model.dtype, got, mend)
        return found

    def at_masked_sites(x: Tensor, t: float) -> Tensor:
        ids = x.argmax(-1) if x.is_floating_point() else x
        return torch.where((ids == mask_id).unsqueeze(-1), log_x0(x, t).exp(), 0.0)

    for index in sorted({0, len(model.steps) // 2, len(model.steps) - 1}):
        t = model.steps[index].t
        what = f"the denoiser at t = {t:.4g}"
        with torch.no_grad(), _as_assertions():
            found = log_x0(x, t)
            demand(not found.isnan().any(), f"{what} gives NaN", "Check its weights, and log(0) - log(0) in its norm")
            check_log_probs(found, x, model.kernel, tol)
        vocab_size = model.vocab_size if one_hots else None
        _assert_function(what, partial(at_masked_sites, t=t), x, vocab_size, tol, generator)


def assert_reward(
    reward: Reward,
    vocab_size: int,
    length: int,
    *,
    mask_id: int | None = None,
    differentiable: bool = False,
    rows: int = 8,
    tolerance: float | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> None:
    """The reward returns one number for each clean sequence, finite or -inf, that depends on this sequence alone.

    If `differentiable` it also takes one-hots (P, L, V), with a gradient. Sequences are random, without the mask.
    """
    generator, tilt = torch.Generator(device).manual_seed(seed), Tilt(reward)
    x = random_tokens((rows, length), vocab_size, mask_id, generator)
    with torch.no_grad(), _as_assertions():
        dtype = torch.as_tensor(reward(x.clone())).dtype
        r = tilt.exact(x.clone())
    demand(dtype.is_floating_point, f"the reward gives {dtype}", "It must give floats: use .float()")
    bad = int((r.isnan() | (r == torch.inf)).sum())
    mend = "A reward must be finite, or -inf for a hard constraint (which is allowed)"
    demand(bad == 0, f"the reward gives NaN or +inf for {bad} of {rows} random sequences", mend)
    tol = tolerance_for(dtype) if tolerance is None else tolerance
    one_hots = vocab_size if differentiable else None
    _assert_function("the reward", lambda x: tilt.exact(x).to(dtype).unsqueeze(-1), x, one_hots, tol, generator)


def assert_resampler(
    resampler: Resampler, num_particles: int = 6, *, device: torch.device | str = "cpu", seed: int = 0
) -> None:
    """The children of a particle carry, on average, its own weight: so the mean weight of a population is kept, and
    with it the estimate of Z. Checked on even, uneven and partly dead populations."""
    generator = torch.Generator(device).manual_seed(seed)
    even = torch.zeros(num_particles, dtype=torch.float64, device=device)
    uneven = torch.randn(num_particles, generator=generator, dtype=torch.float64, device=device) - 1.0
    halved = uneven.index_fill(0, torch.arange(1, num_particles, 2, device=device), NEVER)
    for kind, own in {"even": even, "uneven": uneven, "partly dead": halved}.items():
        log_w = own.expand(DRAWS, -1).contiguous()
        ancestors, new = resampler(log_w, generator)
        what = f"the resampler, of {kind} weights,"
        got = f"{what} gives ancestors {tuple(ancestors.shape)} and log-weights {tuple(new.shape)}"
        demand(ancestors.shape == new.shape == log_w.shape, got, f"Both must be {tuple(log_w.shape)}, as the input")
        inside = bool(((ancestors >= 0) & (ancestors < num_particles)).all())
        demand(inside, f"{what} gives ancestors outside 0..{num_particles - 1}", "They are places in a population")
        carried = torch.zeros_like(log_w).scatter_add(1, ancestors, new.double().exp())
        off, error = carried.mean(0) - own.exp(), carried.std(0) / DRAWS**0.5
        z = float((off.abs() / (error + 1e-12)).max())
        mend = "A child of particle i carries w_i over the expected number of its children: with plain resampling, the "
        mend += "mean weight, log_w.logsumexp(-1) - log(N)"
        demand(z <= LARGEST_Z, f"{what} changes the mean weight that particles pass on, z-score {z:.3g}", mend)
