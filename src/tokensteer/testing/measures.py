"""Assertions for kernels, p(x_s | x_t), and proposals, q(x_s | x_t): they sum to one and sample what they evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from tokensteer.core.kernels.kernel import Kernel
from tokensteer.core.kernels.measure import Listed, Reveal, SiteMeasure, Table
from tokensteer.core.kernels.schedule import uniform_steps
from tokensteer.core.models.prediction import as_prediction
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.numerics.rows import distinct, support
from tokensteer.core.particles.loop import sweep
from tokensteer.core.particles.path import Evaluation, Measure, Sites, Step
from tokensteer.core.steering.steering import Steering
from tokensteer.testing.assertions import DRAWS, LARGEST_Z, demand, gap_of, partly_masked, random_tokens, tolerance_for
from tokensteer.testing.exact import all_sequences

ENTRIES = 2**25  # numbers held at a time when one particle is copied for its draws
ENOUGH = 100  # expected draws that make a count nearly normal
ENUMERABLE = 20_000  # sequences listed at a time


def _assert_sums_to_one(what: str, log_p: Tensor, mend: str) -> None:
    log_sum = log_p.logsumexp(-1).abs()
    gap = float(log_sum.max()) if log_sum.numel() else 0.0
    demand(gap <= tolerance_for(log_p.dtype), f"{what} does not sum to one: log of the sum is off by {gap:.2g}", mend)


def _assert_table(what: str, measure: SiteMeasure, mend: str, generator: Generator) -> Tensor:
    """A measure that factorises sums to one at every site and agrees with its dense table; returns the table's logs."""
    table = measure.dense()
    _assert_sums_to_one(what, table.log_p, mend)
    y = table.sample(generator)
    gap = gap_of(table.log_prob(y).unsqueeze(-1), measure.log_prob(y).unsqueeze(-1))
    mend = "Let dense() and log_prob() use the same numbers"
    demand(gap <= tolerance_for(table.log_p.dtype), f"{what} and its dense table differ in log_prob by {gap:.2g}", mend)
    return table.log_p


@torch.no_grad()
def _assert_sampled(what: str, measure: Measure, particle: int, entries: int, generator: Generator) -> None:
    """Compare the frequencies of one particle's draws with exp(log_prob), rare sequences pooled."""
    draws = min(DRAWS, ENTRIES // entries + 1)
    copies = torch.full((draws,), particle, device=generator.device)
    y = measure.take(copies).sample(generator)
    first, which = distinct(y)
    count, log_p = torch.bincount(which), measure.take(copies[: len(first)]).log_prob(y[first]).double()
    mend = "Let sample() and log_prob() use the same numbers: same temperature, truncation and precision"
    impossible = int(count[~log_p.isfinite()].sum())
    demand(impossible == 0, f"{what} draws states whose own log_prob is not finite ({impossible} of {draws})", mend)
    often = draws * log_p.exp() >= ENOUGH
    p, seen = log_p[often].exp(), count[often]
    # A state that is never drawn is not listed: its mass is missing from the pooled rest.
    p = torch.cat([p, 1.0 - p.sum(0, keepdim=True)]).clamp(0.0, 1.0)
    seen = torch.cat([seen, draws - seen.sum(0, keepdim=True)])
    # The 1 absorbs rounding errors where p is almost 0 or 1.
    z = float(((seen - draws * p) / (draws * p * (1.0 - p) + 1.0).sqrt()).abs().max())
    # Chi-square of all counts as a z-score (Wilson and Hilferty) finds many small errors.
    freedom = max(1, len(p) - 1)
    chi_square = float(((seen - draws * p) ** 2 / (draws * p + 1.0)).sum())
    spread = 2.0 / (9.0 * freedom)
    z = max(z, ((chi_square / freedom) ** (1.0 / 3.0) - 1.0 + spread) / spread**0.5)
    demand(z <= LARGEST_Z, f"{what} does not sample what it evaluates: z-score {z:.1f} in {draws} draws", mend)


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
    """p(x_s | x_t) sums to one, samples what it evaluates, ends without a mask, and opens only the sites it chose.

    A kernel that chooses no sites also keeps the forward marginals (`marginals=False` for one that only approximates
    them). Checked along uniform_steps(num_steps) with random predictions, at random states and at those it reaches.
    """
    generator, mask_id, steps = torch.Generator("cpu").manual_seed(seed), kernel.mask_id, uniform_steps(num_steps)
    predict = partial(_random_prediction, vocab_size=vocab_size, mask_id=mask_id, dtype=dtype, generator=generator)
    start = torch.full((16, length), mask_id)
    reached, sites = start, None
    for step in steps:
        x = torch.cat([reached, partly_masked(start, vocab_size, mask_id, generator)])
        log_x0, what = predict(x), f"the kernel at step {step.index}"
        measure = _masked_measure(kernel(x, log_x0, step))
        precise, mend = measure.log_stay.dtype == measure.log_move.dtype == dtype, "Make its masses like log_x0"
        demand(precise, f"{what} turns a prediction in {dtype} into masses in {measure.log_stay.dtype}", mend)
        log_p = _assert_table(what, measure, "Give each site masses p to stay and 1 - p to move", generator)
        left = float(log_p[: len(reached), :, mask_id].exp().max()) if step.s == 0 else 0.0
        mend = "Open every masked site with probability exactly 1 when step.s == 0"
        demand(left == 0, f"{what} leaves sites masked at the end, with probability {left:.2g}", mend)
        sites = kernel.choose(x, log_x0, step)
        if sites is not None:
            _assert_sites(what, kernel, measure, step, sites, predict(x))
        halfway = int(((x == mask_id).sum(-1) - length / 2).abs().argmin())
        _assert_sampled(what, measure, halfway, length * vocab_size, generator)
        reached = measure.sample(generator)[: len(reached)]
    if sites is None and marginals:
        clean = random_tokens((min(length, 6),), vocab_size, mask_id, generator)
        _assert_marginals(kernel, steps, clean, one_hot(clean, vocab_size).to(dtype).log())


def _masked_measure(measure: SiteMeasure) -> Reveal:
    if not isinstance(measure, Reveal):
        raise ValueError(f"assert_kernel needs a masked process with Reveal measures, got {type(measure).__name__}")
    return measure


def _random_prediction(x: Tensor, vocab_size: int, mask_id: int, dtype: torch.dtype, generator: Generator) -> Tensor:
    """log p(x_0 | x_t) far from uniform, so that some tokens are likely in any vocabulary."""
    logits = 2.0 * torch.randn(*x.shape, vocab_size, generator=generator, device=x.device, dtype=dtype)
    return logits.index_fill(-1, torch.tensor(mask_id, device=x.device), NEVER).log_softmax(-1)


def _assert_sites(what: str, kernel: Kernel, measure: Reveal, step: Step, sites: Sites, other: Tensor) -> None:
    """Chosen sites are masked ones, and sites given to the kernel are kept, even with an `other` prediction."""
    x = measure.x
    mend = "choose() must return booleans of the shape of x, true at masked sites only; or None"
    demand(isinstance(sites, Tensor), f"{what} chooses a {type(sites).__name__}", mend)
    assert isinstance(sites, Tensor)
    fits = sites.dtype == torch.bool and sites.shape == x.shape and not (sites & ~measure.masked).any()
    demand(fits, f"{what} chooses sites that are not masked sites of x", mend)
    again, shared = (_masked_measure(kernel(x, log_x0, step, sites)) for log_x0 in (measure.log_x0, other))
    kept = torch.equal(again.dense().log_p, measure.dense().log_p)
    for given in (measure, again, shared):
        strays = given.masked & (given.log_move > NEVER) & ~sites
        kept = kept and isinstance(given.sites, Tensor) and torch.equal(given.sites, sites) and not strays.any()
    mend = "p and q share their sites: open those given, call choose() only without them, put them in the measure"
    demand(kept, f"{what} does not keep to the sites it is given", mend)


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
        demand(
            abs(worst - alpha_s) <= tolerance_for(log_x0.dtype),
            f"the kernel at step {step.index} does not keep the forward marginal: a share {alpha_t:.6g} of open "
            f"sites at t becomes {worst:.6g} at s, and alpha_s is {alpha_s:.6g}",
            "Keep sigma within its bound min(1, (1 - alpha_s)/alpha_t), open masked sites with probability "
            "(alpha_s - (1 - sigma)·alpha_t)/(1 - alpha_t), and let survival() be alpha_t/alpha_s",
        )
        alpha_s = alpha_t


def assert_proposal(steering: Steering, *, rows: int = 16, seed: int = 0) -> None:
    """q sums to one, covers p, and samples what it evaluates; E_q[p/q · f] is the sum of p · f for every f.

    Checked at every step, at the states that `rows` particles reach. Where p and q reach too many sequences to list, a
    q that does not factorise is only checked by draws.
    """
    if steering.model.populations > 1:
        raise ValueError("test one template at a time: give the model a template of shape (L,)")
    generator = torch.Generator(steering.model.device).manual_seed(seed)
    # sweep yields after each step, so the proposal is checked before a broken weight stops the run.
    for step, record in zip(steering.steps, sweep(steering, rows, generator=generator), strict=False):
        _assert_move(steering, record.x.flatten(0, 1), record.evaluation, step, generator)


@torch.no_grad()
def _assert_move(steering: Steering, x: Tensor, evaluation: Evaluation, step: Step, generator: Generator) -> None:
    model, what = steering.model, f"the proposal at step {step.index}"
    found = as_prediction(evaluation.prediction)
    prediction = model.predict(x, step.t) if found is None else found  # a proposal may predict later, and otherwise
    q = steering.propose(x, evaluation, step)
    p = model.transition(x, prediction, step, q.sites)
    log_p = p.dense().log_p
    normalise = "Return measure.normalise() or the result of tilt(), and keep NaN out of it"
    cover = "Give q mass wherever p has some: no top-k, nucleus or -inf that p does not have, and the sites of p"
    if isinstance(q, Reveal | Table) and q.factorises:
        in_reach = _assert_table(what, q, normalise, generator)
        covers = q.covers(p)
    else:
        in_reach = _reach(q, log_p)
        covers = not (q.log_prob(p.normalise().sample(generator)) == NEVER).any()
    demand(covers, f"{what} does not cover p: it never makes some of the moves that p makes", cover)
    y = q.sample(generator)
    strange = int((~q.log_prob(y).isfinite() | steering.log_ratio(y, x, evaluation, step, q).isnan()).sum())
    mend = "Let sample() and log_prob() use the same numbers, and keep NaN out of p and q"
    demand(strange == 0, f"{what} draws states where log q is not finite or log p - log q is NaN ({strange})", mend)

    if model.vocab_size ** x.shape[1] * len(x) <= ENUMERABLE:
        in_reach = torch.zeros_like(log_p)  # few enough to list every sequence
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
    wrong = int((~(total_lost <= tolerance_for(model.dtype) * total_p)).sum())
    demand(wrong == 0, f"{what} does not cover p: q·(p/q) is not p over all states, for {wrong} particles", cover)
    _assert_sampled(what, q, int(order[max(0, len(few) - 1)]), x.shape[-1] * model.vocab_size, generator)


def _reach(q: Measure, log_p: Tensor) -> Tensor:
    """0 at every token that q may put at a site, -inf elsewhere, (P, L, V)."""
    if isinstance(q, SiteMeasure):
        return torch.where(q.dense().log_p > NEVER, 0.0, NEVER).to(log_p)
    if not isinstance(q, Listed):  # its support is unknown
        return torch.zeros_like(log_p)
    tokens = log_p.new_full((int(q.owner.max()) + 1, *log_p.shape[1:]), NEVER)
    tokens[q.owner.unsqueeze(-1), torch.arange(log_p.shape[1], device=log_p.device), q.candidates] = 0.0
    return tokens[q.row]
