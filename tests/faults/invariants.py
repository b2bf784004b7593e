"""What must hold of every run, whatever its configuration."""

from __future__ import annotations

import math
import tempfile
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

import tokensteer as ts
from tests.faults.runs import Plan
from tests.faults.steerings import Aim
from tests.helpers.extended import MaskGITExtended
from tokensteer.core.kernels.kernel import Stateful
from tokensteer.testing import score

CLOSE = 1e-9  # weights are float64, whatever the precision of the networks


ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}  # of what networks of this precision compute anew


class BrokenError(AssertionError):
    """An invariant does not hold."""


def demand(holds: object, what: str) -> None:
    if not holds:
        raise BrokenError(what)


def check_sequences(samples: Tensor, aim: Aim) -> None:
    """Clean ids (B, ..., L): in range, without a mask, with the tokens that the templates fix."""
    model, canvas = aim.steering.model, aim.made.canvas
    demand(((samples >= 0) & (samples < model.vocab_size)).all(), "samples are ids of the vocabulary")
    demand((samples != model.kernel.mask_id).all(), "no mask is left")
    fixed = canvas.repeat_interleave(len(samples) // len(canvas), 0).view(len(samples), *[1] * (samples.dim() - 2), -1)
    demand(((samples == fixed) | (fixed == model.kernel.mask_id)).all(), "fixed sites are kept")


def check_result(result: ts.Result, aim: Aim) -> None:
    samples, log_w = result.samples, result.log_w
    populations, particles = log_w.shape
    check_sequences(samples, aim)
    demand(not (log_w.isnan() | (log_w == math.inf)).any(), "log-weights are finite or -inf")
    highest = log_w.amax(-1).clamp(min=torch.finfo(torch.float64).min)
    log_mean = (log_w - highest.unsqueeze(-1)).exp().mean(-1).log() + highest
    demand(torch.allclose(result.log_z, log_mean, rtol=CLOSE, atol=CLOSE), "log_z is the log-mean of the weights")
    ess = result.ess
    demand(((ess == 0) | ((ess >= 1 - CLOSE) & (ess <= particles * (1 + CLOSE)))).all(), "the ESS is in [1, N]")
    demand(torch.equal(ess[-1] > 0, result.alive), "the ESS is 0 where a population has died, and nowhere else")
    demand(((result.ancestors >= 0) & (result.ancestors < particles)).all(), "ancestors exist")
    demand(result.ancestors.shape == (len(ess), populations, particles), "ancestors have one row for each time")
    demand(min([0, *result.rows.values(), *result.saved.values()]) == 0, "counts of rows are not negative")
    total = result.weights.sum(-1)
    demand(torch.allclose(total, torch.ones_like(total), rtol=CLOSE, atol=CLOSE), "weights sum to one")
    if aim.reward is not None:
        worth = aim.reward.worth[tuple(samples.unbind(-1))]
        if aim.rule is not None:
            worth = worth.masked_fill(~aim.rule.accepts(samples.flatten(0, 1)).view_as(worth), -math.inf)
        demand(result.reward is not None and torch.equal(result.reward.double(), worth), "rewards are those of samples")
    if bool(result.alive.all()):
        drawn = result.draw(3, torch.Generator().manual_seed(0))
        demand((log_w.gather(1, drawn) > -math.inf).all(), "a draw has weight")
    if result.states is not None and result.states_log_w is not None:
        kept = result.states.shape[1]
        demand(torch.equal(result.states[-1].long(), samples[:kept]), "states end in the samples")
        demand(torch.equal(result.states_log_w[-1], log_w[:kept]), "weights of states end in those of the samples")


def checked(resample: ts.resampling.Resampler) -> ts.resampling.Resampler:
    """A resampler, what it returns checked: it keeps the mean weight and chooses no particle of weight 0."""
    keeps_mean = resample is not ts.resampling.heaviest  # by design it does not

    def checking(log_w: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        ancestors, log_new = resample(log_w, generator)
        alive = log_w.amax(-1) > -math.inf
        before, after = log_w[alive].logsumexp(-1), log_new[alive].logsumexp(-1)
        close = (after - before).abs() <= CLOSE * (1.0 + before.abs())
        demand(not keeps_mean or close.all(), "resampling keeps the mean weight")
        dead = log_w.gather(1, ancestors) == -math.inf
        demand(not (dead & (log_new > -math.inf))[alive].any(), "particles of weight 0 have no children with weight")
        demand((log_new[~alive] == -math.inf).all(), "a population that has died stays dead")
        return ancestors, log_new

    return checking


def check_weights(records: list[ts.Record], plan: Plan) -> None:
    """No weight is lost or made: a step starts from the mean weight that the step before ended with, resampled or not,
    and the child of a particle without weight has none."""
    keeps_mean = plan.options["resample"] is not ts.resampling.heaviest
    for before, after in pairwise(records):
        rises = (before.log_w.gather(1, after.ancestors) == -math.inf) & (after.log_w > -math.inf)
        demand(not rises.any(), "a particle without weight stays without")
        here = (after.ancestors == torch.arange(after.ancestors.shape[1])).all(-1)
        started = after.log_w - after.log_increment
        whole = (after.log_w > -math.inf).all(-1) & (before.log_w.amax(-1) > -math.inf)
        if not keeps_mean:
            whole &= here & ((started - before.log_w).abs().amax(-1) < CLOSE)
        log_mean = started.logsumexp(-1) - math.log(started.shape[1])
        close = (log_mean - before.log_z).abs() <= CLOSE * (1.0 + before.log_z.abs())
        demand(close[whole].all(), "a step starts from the mean weight of the one before")


def check_path(records: list[ts.Record], plan: Plan) -> None:
    """Where nothing is resampled, a weight is that of its path, evaluated anew from the start without what earlier
    steps stored: the sum of log p - log q, and r/kl."""
    steering, made = plan.aim.steering, plan.aim.made
    unresampled = plan.options["when"] in (ts.triggers.never, ts.triggers.observe)
    # q is not that of the path alone if its gradient is random, or if it uses a ramp that all particles choose.
    random = steering.twist is not None and (
        isinstance(steering.twist.ramp, ts.Adaptive)
        or (steering.twist.estimator.random and steering.proposal.needs_gradient)
    )
    remembers = isinstance(steering.model.kernel, Stateful | MaskGITExtended)
    if not unresampled or plan.sampler != "smc" or random or remembers:
        return
    paths = torch.stack([record.x.flatten(0, 1) for record in records], 1)
    anew = score(steering, paths)
    log_w = anew.log_twist[:, 0] + anew.log_increment.sum(-1)
    found = records[-1].log_w.flatten()
    finite = (found > -math.inf) & (anew.log_twist > -math.inf).all(-1)
    close = (log_w - found).abs() <= ROUNDING[made.model.dtype] * (1.0 + found.abs())
    demand(close[finite].all(), "a weight is that of its path")


def check_plain(result: ts.Result, plan: Plan) -> None:
    """Where p is q and nothing is resampled, the log-weight is r/kl."""
    steering = plan.aim.steering
    plain = type(steering.proposal) is ts.FromModel and isinstance(steering.model, ts.Diffusion)
    unresampled = plan.options["when"] in (ts.triggers.never, ts.triggers.observe)
    if plain and unresampled and plan.sampler == "smc" and steering.twist is not None and result.reward is not None:
        exact = result.reward / steering.twist.kl
        demand(torch.allclose(result.log_w, exact, rtol=1e-9, atol=1e-9), "log-weights are r/kl")


def same(a: ts.Result, b: ts.Result, exactly: bool = True) -> bool:
    """Equal samples and weights: bit for bit, or weights up to rounding."""
    close = torch.equal(a.log_w, b.log_w) if exactly else torch.allclose(a.log_w, b.log_w, rtol=CLOSE, atol=CLOSE)
    return torch.equal(a.samples, b.samples) and torch.equal(a.ancestors, b.ancestors) and close


def check_stored(result: ts.Result) -> None:
    """A result that is saved and opened again is the same."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.safetensors"
        result.save(file)
        again = ts.Result.load(file)
    demand(same(result, again), "a stored result has the same samples, weights and ancestors")
    for name in ("reward", "ess", "mean_reward", "ramp", "states", "states_log_w"):
        first, second = getattr(result, name), getattr(again, name)
        alike = (
            first is second if first is None or second is None else torch.equal(first.nan_to_num(), second.nan_to_num())
        )
        demand(alike, f"a stored result has the same {name}")
    demand((dict(result.rows), dict(result.saved)) == (again.rows, again.saved), "a stored result has the same counts")
    demand((repr(result), result.html()) == (repr(again), again.html()), "a stored result is shown as before")
