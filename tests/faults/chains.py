"""Particle Gibbs against enumeration: a sweep from exact draws of the target on paths ends in exact draws."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import tokensteer as ts
from tests.faults.choices import Choices
from tests.faults.exactness import LEAST, PARTICLES, SUSPECT, Scores, enumerated, truth
from tests.faults.runs import Plan
from tokensteer.core.numerics.draws import inverse_cdf
from tokensteer.testing.exact import Enumeration

CHAINS = (400, 6000, 60_000)  # at each look
IMPOSSIBLE = 5.0  # a share has no heavy tails


def exact_paths(exact: Enumeration, count: int, generator: torch.Generator) -> Tensor:
    """Independent draws of the target on paths, (T + 1, count, L): a step to x_s has the probability p(x_s | x_t) times
    V(x_s)/V(x_t), with V the soft value."""
    number = len(exact.states)
    log_p = exact.log_law[0] + exact.log_value[0]
    at = _drawn(log_p.expand(count, number), generator)
    path = [at]
    for moves, log_value in zip(exact.moves, exact.log_value[1:], strict=True):
        log_p = torch.full((number, number), -math.inf, dtype=torch.float64)
        log_p[moves.row, moves.column] = (moves.log_p + log_value[moves.column]).double()
        at = _drawn(log_p[at], generator)
        path.append(at)
    return exact.states[torch.stack(path)]


def _drawn(log_p: Tensor, generator: torch.Generator) -> Tensor:
    p = log_p.double().softmax(-1)
    u = torch.rand((len(p), 1), generator=generator, dtype=torch.float64)
    return inverse_cdf(p, u).squeeze(-1)


def judge_chain(scores: Scores, choices: Choices, plan: Plan, row: int, seed: int) -> None:
    """Whether one sweep of the plan leaves the share of a set of sequences, given exact paths of one template."""
    aim = plan.aim
    if not (aim.made.canvas[row] == aim.steering.model.kernel.mask_id).any():
        return
    exact, known = enumerated(aim.of_population(row)), truth(aim, row, choices.seed)
    if exact is None or known.log_z < LEAST or not 1e-3 < known.share < 1 - 1e-3:
        return
    steering = aim.of_population(row, aim.proposal)
    particles = max(2, min(PARTICLES, plan.options["num_particles"]))
    z = math.inf
    for look, count in enumerate(CHAINS):
        if abs(z) > SUSPECT:
            generator = torch.Generator().manual_seed(seed + 1000 * look)
            chain = ts.particle_gibbs(
                steering,
                1,
                particles,
                count,
                when=plan.options["when"],
                ancestor_sampling=seed % 2 == 0,
                reference=exact_paths(exact, count, generator),
                generator=generator,
            )
            inside = known.chosen[tuple(chain.samples[-1].unbind(-1))]
            error = math.sqrt(known.share * (1 - known.share) / count)
            z = (float(inside.mean()) - known.share) / error
    scores.add(choices, "a chain", z, -IMPOSSIBLE, IMPOSSIBLE)
