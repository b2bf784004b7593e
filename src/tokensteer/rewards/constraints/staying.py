"""rho_t: the probability that an open site is never masked again, which a look-ahead needs under remasking."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from tokensteer.core.kernels.measure import Reveal, SiteMeasure
from tokensteer.core.models.diffusion import Model
from tokensteer.core.proposals.after_remasking import AfterRemasking


@dataclass(frozen=True, eq=False)
class Kept:
    """rho_t: the probability that a site open at time t is never masked again, (B, L) for each of `times`."""

    times: tuple[float, ...]
    table: Tensor

    def at(self, t: float, rows: int) -> Tensor:
        """rho for each particle, (P, L), at the first of the ascending times that is at least t."""
        rho = self.table[min(bisect_left(self.times, t), len(self.times) - 1)]
        if rows % len(rho):
            raise ValueError(
                f"the look-ahead of a constraint differs between {len(rho)} templates, and {rows} rows belong to no "
                "whole number of each: Enumerated() needs one template here, or a kernel without remasking"
            )
        return rho.expand(rows, -1) if len(rho) == 1 else rho.repeat_interleave(rows // len(rho), 0)


def kept(model: Model) -> Kept:
    """rho of a model: the product, backwards in time, of the kernel's probabilities that an open site stays open."""
    canvas = model.start(model.populations, None)
    free = canvas == model.kernel.mask_id
    canvas = canvas.masked_fill(free, 1 if model.kernel.mask_id == 0 else 0)
    any_token = torch.zeros(1, dtype=model.dtype, device=model.device).expand(*canvas.shape, model.vocab_size)
    rho = torch.ones_like(canvas, dtype=torch.float64)
    table = [rho]
    for step in reversed(model.steps):
        if model.kernel.remasks(step):
            rho = rho * as_reveal(model.step_with(canvas, any_token, step, None)).log_stay.double().exp()
        table.append(rho)
    whole = torch.stack(table)
    alike = bool((whole == whole[:, :1]).all())  # then rows need not be whole populations, as candidates are not
    return Kept((0.0, *(step.t for step in reversed(model.steps))), whole[:, :1] if alike else whole)


def as_reveal(measure: SiteMeasure) -> Reveal:
    """The measure, of a product that remasks the one given all open sites: conditioning needs it site by site."""
    measure = measure.first if isinstance(measure, AfterRemasking) else measure
    if not isinstance(measure, Reveal):
        raise ValueError(
            f"constraints need a masked process whose sites move independently of their tokens, and got "
            f"{type(measure).__name__}: use a kernel such as Ancestral or Ranked"
        )
    return measure
