"""Laws that users can hold their own denoiser, kernel, proposal, reward and resampler to.

Each law asks what the theory needs and no more, and raises an AssertionError that says what is broken and how to mend
it. Equalities hold up to 1e-4 in float32 and 1e-8 in float64; what is sampled is held against what is evaluated by
z-scores. Randomness comes from a generator made from `seed`; the global one is not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from tokensteer.core.kernels.kernel import Kernel
from tokensteer.core.kernels.measure import Listed, Reveal, SiteMeasure, Table
from tokensteer.core.kernels.schedule import uniform_steps
from tokensteer.core.models.diffusion import Diffusion
from tokensteer.core.models.prediction import Prediction
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.numerics.rows import distinct, support
from tokensteer.core.particles.loop import sweep
from tokensteer.core.particles.path import Evaluation, Measure, Sites, Step
from tokensteer.core.particles.resampling import Resampler
from tokensteer.core.steering.steering import Steering
from tokensteer.core.twists.tilt import Reward
from tokensteer.testing.exact import all_sequences

DRAWS = 20_000
ENTRIES = 2**25  # numbers held at a time when one particle is copied for its draws
ENOUGH = 100  # expected draws that make a count nearly normal
LARGEST_Z = 5.0
ENUMERABLE = 20_000  # sequences listed at a time

Answer = Callable[[Tensor], Tensor]


def _demand(holds: bool, broken: str, mend: str) -> None:
    if not holds:
        raise AssertionError(f"{broken}. {mend}.")


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-8 if dtype == torch.float64 else 1e-4


def _gap(a: Tensor, b: Tensor) -> float:
    """max over rows of sum |a - b| / (1 + |a|) over the last axis; equal infinities are equal, NaN equals nothing."""
    apart = torch.where((a - b).isfinite(), (a - b).abs() / (1.0 + a.abs()), torch.inf)
    return float(torch.where(a == b, 0.0, apart).double().sum(-1).max())


def _random_tokens(shape: tuple[int, ...], vocab_size: int, mask_id: int | None, generator: Generator) -> Tensor:
    """Uniform ids, never the mask."""
    ids = torch.randint(vocab_size - (mask_id is not None), shape, generator=generator, device=generator.device)
    return ids if mask_id is None else ids + (ids >= mask_id)


def _partly_masked(canvas: Tensor, vocab_size: int, mask_id: int, generator: Generator) -> Tensor:
    """Random tokens at a share of the masked sites, from none in the first row to most in the last."""
    shares = torch.linspace(0.0, 1.0, len(canvas) + 1, device=canvas.device)[:-1].unsqueeze(-1)
    opens = torch.rand(canvas.shape, generator=generator, device=canvas.device) < shares
    tokens = _random_tokens(tuple(canvas.shape), vocab_size, mask_id, generator)
    return torch.where(opens & (canvas == mask_id), tokens, canvas)


# ---- functions of sequences: denoisers and rewards


def _assert_function(what: str, answer: Answer, x: Tensor, tol: float, generator: Generator) -> Tensor:
    """`answer` (P, ..., K) is a function, of each row for itself; returns its values."""
    with torch.no_grad():
        written = x._version
        first, again = answer(x), answer(x)
        _demand(x._version == written, f"{what} writes to the sequences that it is given", "Let it clone them")
        alone = torch.cat([answer(x[i : i + 1]) for i in range(len(x))])
        order = torch.randperm(len(x), generator=generator, device=x.device)
        permuted = answer(x[order])
    gap, mend = _gap(first, again), "Call network.eval() to turn dropout off, and draw no random numbers inside"
    _demand(gap <= tol, f"{what} is not deterministic: two calls on the same input differ by {gap:.2g}", mend)
    gap = max(_gap(first, alone), _gap(first[order], permuted))
    mend = "Look for batch norm (call network.eval()) and for attention, sums or statistics across rows"
    _demand(gap <= tol, f"{what} mixes rows: neighbours in the batch change what it says by {gap:.2g}", mend)
    return first


def _assert_one_hots(what: str, answer: Answer, hard: Tensor, x: Tensor, tol: float, generator: Generator) -> None:
    """`answer` says of one-hots x what it said of ids (`hard`), and a random functional of it has a gradient in x."""
    x = x.requires_grad_()
    mend = "Embed floating-point input as x @ embedding.weight, or do without gradients"
    try:
        with torch.enable_grad():
            soft = answer(x)
    except Exception as error:
        raise AssertionError(f"{what} fails on one-hots (P, L, V): {error}. {mend}.") from error
    gap = _gap(hard, soft.detach())
    _demand(gap <= tol, f"{what} says one thing of ids and another of their one-hots: they differ by {gap:.2g}", mend)
    seen = soft[hard > NEVER]
    total = (seen * torch.randn(seen.shape, generator=generator, device=seen.device, dtype=seen.dtype)).sum()
    gradient = torch.zeros_like(x)
    if total.requires_grad:
        gradient = torch.autograd.grad(total, x, materialize_grads=True)[0]
    mend = "Look for log, sqrt or division at 0, and keep them out of the graph with a `where` on their input"
    _demand(bool(gradient.isfinite().all()), f"{what} has a gradient in its one-hots that is not finite", mend)
    mend = "Look for argmax, rounding, detach() or no_grad() on the way; if all rewards are -inf, ask for more rows"
    _demand(bool(gradient.any()), f"{what} has a gradient in its one-hots that is zero everywhere", mend)


def assert_denoiser(
    model: Diffusion, *, one_hots: bool = True, rows: int = 8, tolerance: float | None = None, seed: int = 0
) -> None:
    """The denoiser gives log p(x_0 | x_t): normalised at masked sites, -inf at the mask, each row for itself.

    With `one_hots` it also takes them in place of ids, with a gradient. Asked around the template with random tokens at
    some of its free sites. Networks in half precision need a larger `tolerance`.
    """
    generator, mask_id = torch.Generator(model.device).manual_seed(seed), model.kernel.mask_id
    templates = model.template.reshape(-1, model.template.shape[-1])
    canvas = templates[torch.arange(rows, device=model.device) % len(templates)]
    x = _partly_masked(canvas, model.vocab_size, mask_id, generator)
    tol = _tolerance(model.dtype) if tolerance is None else tolerance

    def log_x0(x: Tensor, t: float) -> Tensor:
        answer, shape = model.denoiser(x, t), (*x.shape[:2], model.vocab_size)
        got = f"the denoiser gives {answer.dtype} of shape {tuple(answer.shape)} at t = {t:.4g} for {len(x)} sequences"
        mend = f"It must give {model.dtype} of shape {shape} for any batch: squeeze nothing, and keep one precision"
        _demand(answer.shape == shape and answer.dtype == model.dtype, got, mend)
        return answer

    def at_masked_sites(x: Tensor, t: float) -> Tensor:
        ids = x.argmax(-1) if x.is_floating_point() else x
        return torch.where((ids == mask_id).unsqueeze(-1), log_x0(x, t).exp(), 0.0)

    for index in sorted({0, len(model.steps) // 2, len(model.steps) - 1}):
        t = model.steps[index].t
        what, probabilities = f"the denoiser at t = {t:.4g}", partial(at_masked_sites, t=t)
        with torch.no_grad():
            answer = log_x0(x, t)
        _demand(not answer.isnan().any(), f"{what} gives NaN", "Check its weights, and log(0) - log(0) in its norm")
        answer, mend = answer[x == mask_id], "Wrap raw logits as from_logits(network, mask_id)"
        mass, gap = float(answer[:, mask_id].exp().max()), float(answer.logsumexp(-1).abs().max())
        _demand(mass == 0, f"{what} gives mass {mass:.2g} to the mask at masked sites: it must say -inf", mend)
        _demand(gap <= tol, f"{what} is not normalised at masked sites: log of the sum is off by {gap:.2g}", mend)
        hard = _assert_function(what, probabilities, x, tol, generator)
        if one_hots:
            hot = one_hot(x, model.vocab_size).to(model.dtype)
            _assert_one_hots(f"{what} (one_hots=True)", probabilities, hard, hot, tol, generator)


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
    """The reward gives each clean sequence one number: finite or -inf, always the same, whatever its neighbours.

    If `differentiable` it also takes one-hots (P, L, V), with a gradient. Asked at random sequences without the mask.
    """
    generator = torch.Generator(device).manual_seed(seed)
    x = _random_tokens((rows, length), vocab_size, mask_id, generator)

    def column(x: Tensor) -> Tensor:
        r = torch.as_tensor(reward(x))
        got = f"the reward gives {r.dtype} of shape {tuple(r.shape)} for {len(x)} sequences"
        mend = f"It must give floats of shape ({len(x)},), one for each: sum or squeeze(-1) what is left, use .float()"
        _demand(r.shape == (len(x),) and r.is_floating_point(), got, mend)
        return r.unsqueeze(-1)

    with torch.no_grad():
        r = column(x)
    bad = int((r.isnan() | (r == torch.inf)).sum())
    mend = "A reward must be finite, or -inf for a hard constraint (which is allowed)"
    _demand(bad == 0, f"the reward gives NaN or +inf for {bad} of {rows} random sequences", mend)
    tol = _tolerance(r.dtype) if tolerance is None else tolerance
    hard = _assert_function("the reward", column, x, tol, generator)
    if differentiable:
        hot = one_hot(x, vocab_size).to(r.dtype)
        _assert_one_hots("the reward (differentiable=True)", column, hard, hot, tol, generator)


# ---- resamplers


def assert_resampler(
    resampler: Resampler, num_particles: int = 6, *, device: torch.device | str = "cpu", seed: int = 0
) -> None:
    """The weight that the children of a particle carry is, on average, its own: given the weights, the mean weight of a
    population is kept, and with it the estimate of Z. Asked of even, uneven and partly dead populations."""
    generator = torch.Generator(device).manual_seed(seed)
    even = torch.zeros(num_particles, dtype=torch.float64, device=device)
    uneven = torch.randn(num_particles, generator=generator, dtype=torch.float64, device=device) - 1.0
    halved = uneven.index_fill(0, torch.arange(1, num_particles, 2, device=device), NEVER)
    for kind, own in {"even": even, "uneven": uneven, "partly dead": halved}.items():
        log_w = own.expand(DRAWS, -1).contiguous()
        ancestors, new = resampler(log_w, generator)
        what = f"the resampler, of {kind} weights,"
        got = f"{what} gives ancestors {tuple(ancestors.shape)} and log-weights {tuple(new.shape)}"
        _demand(
            ancestors.shape == new.shape == log_w.shape, got, f"Both must be {tuple(log_w.shape)}, as what is given"
        )
        inside = bool(((ancestors >= 0) & (ancestors < num_particles)).all())
        _demand(inside, f"{what} gives ancestors outside 0..{num_particles - 1}", "They are places in a population")
        carried = torch.zeros_like(log_w).scatter_add(1, ancestors, new.double().exp())
        off, error = carried.mean(0) - own.exp(), carried.std(0) / DRAWS**0.5
        z = float((off.abs() / (error + 1e-12)).max())
        mend = "A child of particle i carries w_i over the expected number of its children: with plain resampling, the "
        mend += "mean weight, log_w.logsumexp(-1) - log(N)"
        _demand(z <= LARGEST_Z, f"{what} changes the weight that particles hand on, by a z-score of {z:.3g}", mend)


# ---- measures: kernels and proposals


def _assert_sums_to_one(what: str, log_p: Tensor, mend: str) -> None:
    log_sum = log_p.logsumexp(-1).abs()
    gap = float(log_sum.max()) if log_sum.numel() else 0.0
    _demand(gap <= _tolerance(log_p.dtype), f"{what} does not sum to one: log of the sum is off by {gap:.2g}", mend)


def _assert_table(what: str, measure: SiteMeasure, mend: str, generator: Generator) -> Tensor:
    """A measure that factorises sums to one at every site and is what its table says; returns the table's logs."""
    table = measure.dense()
    _assert_sums_to_one(what, table.log_p, mend)
    y = table.sample(generator)
    gap = _gap(table.log_prob(y).unsqueeze(-1), measure.log_prob(y).unsqueeze(-1))
    mend = "Let dense() spell out the numbers that log_prob() reads"
    _demand(gap <= _tolerance(table.log_p.dtype), f"{what} and its dense table differ in log_prob by {gap:.2g}", mend)
    return table.log_p


@torch.no_grad()
def _assert_sampled(what: str, measure: Measure, particle: int, entries: int, generator: Generator) -> None:
    """Frequencies of draws from one particle's measure against exp(log_prob), rare sequences taken together."""
    draws = min(DRAWS, ENTRIES // entries + 1)
    copies = torch.full((draws,), particle, device=generator.device)
    y = measure.take(copies).sample(generator)
    first, which = distinct(y)
    count, log_p = torch.bincount(which), measure.take(copies[: len(first)]).log_prob(y[first]).double()
    mend = "Let sample() draw from the numbers that log_prob() reads: same temperature, truncation and precision"
    impossible = int(count[~log_p.isfinite()].sum())
    _demand(impossible == 0, f"{what} draws states whose own log_prob is not finite ({impossible} of {draws})", mend)
    often = draws * log_p.exp() >= ENOUGH
    p, seen = log_p[often].exp(), count[often]
    # A state that log_prob promises and sample() never draws is not listed: it is missed in the rest.
    p = torch.cat([p, 1.0 - p.sum(0, keepdim=True)]).clamp(0.0, 1.0)
    seen = torch.cat([seen, draws - seen.sum(0, keepdim=True)])
    # The 1 keeps what is all but certain, or all but impossible, from being judged by its rounding errors.
    z = float(((seen - draws * p) / (draws * p * (1.0 - p) + 1.0).sqrt()).abs().max())
    # Many small errors at once: chi-square of all counts, as a z-score (Wilson and Hilferty).
    freedom = max(1, len(p) - 1)
    chi_square = float(((seen - draws * p) ** 2 / (draws * p + 1.0)).sum())
    spread = 2.0 / (9.0 * freedom)
    z = max(z, ((chi_square / freedom) ** (1.0 / 3.0) - 1.0 + spread) / spread**0.5)
    _demand(z <= LARGEST_Z, f"{what} does not sample what it evaluates: z-score {z:.1f} in {draws} draws", mend)


def assert_kernel(
    kernel: Kernel,
    vocab_size: int,
    *,
    length: int = 4,
    num_steps: int = 4,
    marginals: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> None:
    """p(x_s | x_t) sums to one, samples what it evaluates, ends without a mask, and keeps to the sites it chose.

    A kernel that chooses no sites also keeps the forward marginals (`marginals=False` for one that only approximates
    them). Asked along uniform_steps(num_steps), with random
    predictions, at random states and at those the kernel itself leads to.
    """
    generator, mask_id, steps = torch.Generator("cpu").manual_seed(seed), kernel.mask_id, uniform_steps(num_steps)
    predict = partial(_random_prediction, vocab_size=vocab_size, mask_id=mask_id, dtype=dtype, generator=generator)
    start = torch.full((16, length), mask_id)
    reached, sites = start, None
    for step in steps:
        x = torch.cat([reached, _partly_masked(start, vocab_size, mask_id, generator)])
        log_x0, what = predict(x), f"the kernel at step {step.index}"
        measure = _masked_measure(kernel(x, log_x0, step))
        precise, mend = measure.log_stay.dtype == measure.log_move.dtype == dtype, "Make its masses like log_x0"
        _demand(precise, f"{what} answers a prediction in {dtype} with masses in {measure.log_stay.dtype}", mend)
        log_p = _assert_table(what, measure, "Give each site masses p to stay and 1 - p to move", generator)
        left = float(log_p[: len(reached), :, mask_id].exp().max()) if step.s == 0 else 0.0
        mend = "Open every masked site with probability exactly 1 when step.s == 0"
        _demand(left == 0, f"{what} leaves sites masked at the end, with probability {left:.2g}", mend)
        sites = kernel.choose(x, log_x0, step)
        if sites is not None:
            _assert_sites(what, kernel, measure, step, sites, predict(x))
        halfway = int(((x == mask_id).sum(-1) - length / 2).abs().argmin())
        _assert_sampled(what, measure, halfway, length * vocab_size, generator)
        reached = measure.sample(generator)[: len(reached)]
    if sites is None and marginals:
        clean = _random_tokens((min(length, 6),), vocab_size, mask_id, generator)
        _assert_marginals(kernel, steps, clean, one_hot(clean, vocab_size).to(dtype).log())


def _masked_measure(measure: SiteMeasure) -> Reveal:
    if not isinstance(measure, Reveal):
        raise ValueError("assert_kernel is for masked processes, whose measures are Reveal")
    return measure


def _random_prediction(x: Tensor, vocab_size: int, mask_id: int, dtype: torch.dtype, generator: Generator) -> Tensor:
    """log p(x_0 | x_t), far from uniform, so that some tokens are likely in any vocabulary."""
    logits = 2.0 * torch.randn(*x.shape, vocab_size, generator=generator, device=x.device, dtype=dtype)
    return logits.index_fill(-1, torch.tensor(mask_id, device=x.device), NEVER).log_softmax(-1)


def _assert_sites(what: str, kernel: Kernel, measure: Reveal, step: Step, sites: Sites, other: Tensor) -> None:
    """Sites chosen once are masked ones, and handed on they are kept, even with an `other` prediction."""
    x = measure.x
    mend = "choose() must give booleans of the shape of x, true at masked sites only; or None"
    _demand(isinstance(sites, Tensor), f"{what} chooses a {type(sites).__name__}", mend)
    assert isinstance(sites, Tensor)
    fits = sites.dtype == torch.bool and sites.shape == x.shape and not (sites & ~measure.masked).any()
    _demand(fits, f"{what} chooses sites that are not masked sites of x", mend)
    again, shared = (_masked_measure(kernel(x, log_x0, step, sites)) for log_x0 in (measure.log_x0, other))
    kept = torch.equal(again.dense().log_p, measure.dense().log_p)
    for given in (measure, again, shared):
        strays = given.masked & (given.log_move > NEVER) & ~sites
        kept = kept and isinstance(given.sites, Tensor) and torch.equal(given.sites, sites) and not strays.any()
    mend = "p and q share their sites: open those given, ask choose() only for want of them, put them in the measure"
    _demand(kept, f"{what} does not keep to the sites it is given", mend)


def _assert_marginals(kernel: Kernel, steps: Sequence[Step], clean: Tensor, log_x0: Tensor) -> None:
    """sum over x_t of alpha_t^open (1 - alpha_t)^masked · p(x_s^l = x_0^l | x_t, x_0) = alpha_s at every site l."""
    is_open = all_sequences(2, len(clean)).bool()
    x, count = torch.where(is_open, clean, kernel.mask_id), is_open.double().sum(-1)
    log_x0 = log_x0.repeat(len(x), 1, 1)
    alpha_s = 1.0
    for step in reversed(steps):
        alpha_t = alpha_s * kernel.survival(step)
        weight = alpha_t**count * (1.0 - alpha_t) ** (len(clean) - count)
        right = kernel(x, log_x0, step).dense().log_p.gather(-1, clean.expand_as(x).unsqueeze(-1)).squeeze(-1)
        share = weight @ right.double().exp()
        worst = float(share[(share - alpha_s).abs().argmax()])
        _demand(
            abs(worst - alpha_s) <= _tolerance(log_x0.dtype),
            f"the kernel at step {step.index} does not keep the forward marginal: of a share {alpha_t:.6g} of open "
            f"sites at t it makes {worst:.6g} at s, and alpha_s is {alpha_s:.6g}",
            "Keep sigma within its bound min(1, (1 - alpha_s)/alpha_t), open masked sites with probability "
            "(alpha_s - (1 - sigma)·alpha_t)/(1 - alpha_t), and let survival() be alpha_t/alpha_s",
        )
        alpha_s = alpha_t


def assert_proposal(steering: Steering, *, rows: int = 16, seed: int = 0) -> None:
    """q sums to one, covers p, and samples what it evaluates; E_q[p/q · f] is the sum of p · f for every f.

    Asked at every step, at the states that `rows` particles reach. Where the sequences in reach of p and q are too many
    to list, a q that does not factorise is only held to draws.
    """
    if steering.model.populations > 1:
        raise ValueError("test one template at a time: give the model a template of shape (L,)")
    generator = torch.Generator(steering.model.device).manual_seed(seed)
    # Records come one by one, so a proposal is judged before a broken weight can stop the run.
    for step, record in zip(steering.steps, sweep(steering, rows, generator=generator), strict=False):
        _assert_move(steering, record.x.flatten(0, 1), record.evaluation, step, generator)


@torch.no_grad()
def _assert_move(steering: Steering, x: Tensor, evaluation: Evaluation, step: Step, generator: Generator) -> None:
    model, what = steering.model, f"the proposal at step {step.index}"
    prediction = evaluation.prediction
    assert isinstance(prediction, Prediction), "particles are evaluated before they move"
    q = steering.propose(x, evaluation, step)
    p = model.transition(x, prediction, step, q.sites)
    log_p = p.dense().log_p
    normalise = "Return measure.normalise(), or what tilt() gives, and keep NaN out of it"
    cover = "Give q mass wherever p has some: no top-k, nucleus or -inf that p does not have, and the sites of p"
    if isinstance(q, Reveal | Table) and q.factorises:
        in_reach = _assert_table(what, q, normalise, generator)
        missing = int(((in_reach == NEVER) & (log_p > NEVER)).sum())
    else:
        in_reach = _reach(q, log_p)
        missing = int((q.log_prob(p.normalise().sample(generator)) == NEVER).sum())
    _demand(missing == 0, f"{what} does not cover p: it never makes {missing} of the moves that p makes", cover)
    y = q.sample(generator)
    strange = int((~q.log_prob(y).isfinite() | steering.log_ratio(y, x, evaluation, step, q).isnan()).sum())
    mend = "Let sample() draw from the numbers that log_prob() reads, and keep NaN out of p and q"
    _demand(strange == 0, f"{what} draws states where log q is not finite or log p - log q is NaN ({strange})", mend)

    if model.vocab_size ** x.shape[1] * len(x) <= ENUMERABLE:
        in_reach = torch.zeros_like(log_p)  # the best: all there is, whatever the tables say
    in_reach = torch.maximum(in_reach, log_p)
    sizes, order = (in_reach > NEVER).sum(-1).double().prod(-1).sort()
    few = order[sizes.cumsum(0) <= ENUMERABLE]
    row, y = support(in_reach[few], ENUMERABLE)
    owner = few[row]
    log_q = q.take(owner).log_prob(y).double()
    log_ratio = steering.log_ratio(y, x[owner], evaluation.take(owner), step, q.take(owner)).double()
    sites = None if q.sites is None else q.sites[owner]
    mass_p = model.log_prob(y, x[owner], prediction.take(owner), step, sites).double().exp()
    lost = (torch.where(log_q > NEVER, (log_q + log_ratio).exp(), 0.0) - mass_p).abs()
    totals = torch.zeros(len(few), 3, dtype=torch.float64, device=x.device)
    total_q, total_p, total_lost = totals.index_add(0, row, torch.stack([log_q.exp(), mass_p, lost], -1)).unbind(-1)
    _assert_sums_to_one(what, total_q.log().to(model.dtype).unsqueeze(-1), normalise)
    wrong = int((~(total_lost <= _tolerance(model.dtype) * total_p)).sum())
    _demand(wrong == 0, f"{what} does not cover p: q·(p/q) is not p over all states, for {wrong} particles", cover)
    _assert_sampled(what, q, int(order[max(0, len(few) - 1)]), x.shape[-1] * model.vocab_size, generator)


def _reach(q: Measure, log_p: Tensor) -> Tensor:
    """0 at every token that q may put at a site, -inf elsewhere, (P, L, V)."""
    if not isinstance(q, Listed):  # nothing is known, so anything may be
        return torch.zeros_like(log_p)
    tokens = log_p.new_full((int(q.owner.max()) + 1, *log_p.shape[1:]), NEVER)
    tokens[q.owner.unsqueeze(-1), torch.arange(log_p.shape[1], device=log_p.device), q.candidates] = 0.0
    return tokens[q.row]
