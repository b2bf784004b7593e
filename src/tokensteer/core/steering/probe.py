"""The check that `Steering` makes at construction: two steps of all its parts, so that a misfit is reported at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from tokensteer.core.kernels.measure import Reveal, SiteMeasure, Table
from tokensteer.core.models.prediction import stored_prediction
from tokensteer.core.models.validation import copied, halfway, unwritten
from tokensteer.core.particles.path import Evaluation, Step
from tokensteer.core.proposals.mixture import MixedMeasure
from tokensteer.core.twists.tilt import Tilt

if TYPE_CHECKING:
    from tokensteer.core.steering.steering import Steering


def probe(steering: Steering) -> None:
    """Run a step from the start and one from half-way: shapes fit, and q covers p. Then call the reward."""
    model = steering.model
    generator = torch.Generator(device=model.device).manual_seed(0)
    x = model.start(model.populations, generator)
    evaluation = _probe_step(steering, x, steering.steps[0], generator)
    half_open = halfway(x, model.kernel.mask_id, model.clean(stored_prediction(evaluation)).likeliest)
    _probe_step(steering, half_open, steering.steps[len(steering.steps) // 2], generator)
    if steering.twist is not None:
        _probe_reward(steering.twist, x[:1], model.kernel.mask_id)


def _probe_step(steering: Steering, x: Tensor, step: Step, generator: Generator) -> Evaluation:
    evaluation = steering.evaluate(x, step.t, generator)
    q = steering.propose(x, evaluation, step)
    p = steering.model.transition(x, stored_prediction(evaluation), step, q.sites)
    if isinstance(q, SiteMeasure | MixedMeasure) and not q.covers(p):
        raise ValueError(
            "the proposal gives no mass to states that the model can reach, so weights would miss them: give its "
            "network full support (no top-k, nucleus or -inf logits that the model does not have)"
        )
    if isinstance(q, Reveal | Table) and not (q.total().abs() < 1e-3).all():
        raise ValueError("the proposal does not sum to one: return measure.normalise(), or what tilt() gives")
    return evaluation


def _probe_reward(twist: Tilt, x: Tensor, mask_id: int) -> None:
    """Two rows, which tell a reward that sums over the batch from one that does not; of two contexts, if there are."""
    clean = x.masked_fill(x == mask_id, 1 if mask_id == 0 else 0).repeat(2, 1)
    of = torch.arange(2, device=x.device) % twist.populations
    unwritten("the reward", lambda x: twist.exact(x, of), copied(clean))
