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

CLOSE = 1e-6


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
    log_mean = (
        log_w.exp().mean(-1).log() if float(log_w.abs().masked_fill(log_w == -math.inf, 0.0).max()) < 500 else None
    )
    if log_mean is not None:
        demand(torch.allclose(result.log_z, log_mean, rtol=CLOSE, atol=CLOSE), "log_z is the log-mean of the weights")
    ess = result.ess
    demand(((ess == 0) | ((ess >= 1 - CLOSE) & (ess <= particles * (1 + CLOSE)))).all(), "the ESS is in [1, N]")
    demand(torch.equal(ess[-1] > 0, result.alive), "the ESS is 0 where a population has died, and nowhere else")
    demand(((result.ancestors >= 0) & (result.ancestors < particles)).all(), "ancestors exist")
    demand(result.ancestors.shape == (len(ess), populations, particles), "ancestors have one row for each time")
    demand(min([0, *result.rows.values(), *result.saved.values()]) == 0, "counts of rows are not negative")
    demand(torch.allclose(result.weights.sum(-1), torch.ones(()).double()), "weights sum to one")
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


def check_weights(records: list[ts.Record], plan: Plan) -> None:
    """No weight is lost: the mean weight that a step starts from is that of the step before, resampled or not."""
    heaviest = plan.options["resample"] is ts.resampling.heaviest  # by design it does not keep the mean
    for before, after in pairwise(records):
        started = after.log_w - after.log_increment
        whole = (after.log_w > -math.inf).all(-1) & (before.log_w.amax(-1) > -math.inf)
        if heaviest:
            whole &= (after.ancestors == torch.arange(after.ancestors.shape[1])).all(-1)
            whole &= (after.log_w - after.log_increment - before.log_w).abs().amax(-1) < CLOSE
        log_mean = started.logsumexp(-1) - math.log(started.shape[1])
        close = (log_mean - before.log_z).abs() <= CLOSE * (1.0 + before.log_z.abs())
        demand(close[whole].all(), "resampling keeps the mean weight")


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
    close = torch.equal(a.log_w, b.log_w) if exactly else torch.allclose(a.log_w, b.log_w, rtol=1e-6, atol=1e-6)
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
