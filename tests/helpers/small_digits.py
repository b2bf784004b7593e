"""The task digits with networks, plans and measurements so small that each of its trainings takes a second."""

from __future__ import annotations

from dataclasses import replace

from tokensteer.tasks import nets
from tokensteer.tasks.common import proposals as learned
from tokensteer.tasks.common.training import Trial
from tokensteer.tasks.images import digits
from tokensteer.train import Plan

PLAN = Plan(3, batch_size=8, report_every=2, save_every=2)
RECIPE = replace(
    digits.RECIPE,
    denoiser=nets.UNetConfig(3, 8, 8, channels=(8,), blocks=1, groups=4, heads=2),
    reward=nets.ConvConfig(3, 8, 8, 10, channels=(8,), groups=4),
    judge=nets.PatchConfig(3, 8, 8, 10, hidden=8, depth=1, heads=2),
    plans=(PLAN, PLAN, PLAN),
)
TRIAL = Trial(samples=2, populations=2, examples=20, num_steps=2)
PROPOSAL = replace(
    digits.RECIPE.proposal,
    plan=replace(digits.RECIPE.proposal.plan, rounds=2, paths=4, updates=1, times=2),
    twist=replace(learned.TWIST, rounds=2, paths=4, updates=1, times=2),
    num_steps=3,
)
TAUGHT = replace(digits.RECIPE, proposal=PROPOSAL)
