"""Paths of the forward masking process to given clean sequences, and their probability under a model.

Sites open one by one in time, independently and whatever their tokens are, as in the reverse process of the same
kernel. Such a path can be drawn backwards from x_0, and p(path) / q(path | x_0) is the product of mu(x_0^l | x_t) over
the sites, each at the step that opens it (times the powers and masses of a product of models).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from tokensteer.core.kernels.jumps import TauLeap
from tokensteer.core.kernels.masked import Ancestral
from tokensteer.core.models.context import Query
from tokensteer.core.models.denoiser import Timeless
from tokensteer.core.models.diffusion import Model, located
from tokensteer.core.numerics.draws import inverse_cdf, uniforms
from tokensteer.core.particles.resampling import weights


class Renoised(NamedTuple):
    """Paths (T + 1, B, L), their `log_ratios` (T, B), and whether each is new, (B,)."""

    path: Tensor
    log_ratio: Tensor
    accepted: Tensor


@dataclass(frozen=True)
class ForwardPaths:
    """The forward process of a model. `log_open` and `log_stay` (T,) are log-probabilities that a masked site opens at
    each step, and that it does not."""

    model: Model
    log_open: Tensor
    log_stay: Tensor

    @classmethod
    def of(cls, model: Model) -> ForwardPaths:
        kernel = model.kernel
        name = type(kernel).__name__
        mend = "give the model an Ancestral kernel without remasking: dataclasses.replace(model, kernel=...)"
        if not isinstance(kernel, Ancestral | TauLeap):
            raise ValueError(
                f"the kernel is {name}, which opens sites by their tokens or has no mask, so a finished sequence tells "
                f"nothing of a path to it: {mend}, or use particle_gibbs"
            )
        if any(kernel.remasks(step) for step in model.steps):
            raise ValueError(
                f"the kernel {name} masks open sites again, so a finished sequence tells nothing of the tokens on a "
                f"path to it: {mend}, or use particle_gibbs"
            )
        masked = torch.full((1, 1), kernel.mask_id, device=model.device)
        any_law = torch.zeros(1, 1, model.vocab_size, dtype=torch.float64, device=model.device)
        measures = [kernel(masked, any_law, step) for step in model.steps]
        log_open, log_stay = (
            torch.cat([getattr(measure, name).flatten() for measure in measures]) for name in ("log_move", "log_stay")
        )
        return cls(model, log_open, log_stay)

    @property
    def opening(self) -> Tensor:
        """The probability that a site opens at each step, (T,)."""
        return (self.log_open + self._log_masked).exp()

    @property
    def _log_masked(self) -> Tensor:
        """The log-probability that a site is masked before each step, (T,)."""
        return torch.cat([self.log_stay.new_zeros(1), self.log_stay[:-1].cumsum(0)])

    def step_at(self, share: float) -> int:
        """The number of the step before which the expected share of masked sites is closest to `share`."""
        return int((self._log_masked.exp() - share).abs().argmin())

    def free(self, rows: int) -> Tensor:
        """The sites that the template does not fix, for each of `rows` sequences."""
        return self.model.base.canvas(rows) == self.model.kernel.mask_id

    def draw(self, x: Tensor, generator: Generator | None) -> Tensor:
        """A path to each of the clean sequences x (B, L), (T + 1, B, L)."""
        opening = self.opening
        step = inverse_cdf(opening, uniforms((x.numel(),), opening, generator)).view_as(x)
        step = torch.where(self.free(len(x)), step, -1)
        times = torch.arange(len(opening) + 1, device=x.device).view(-1, 1, 1)
        return torch.where(step < times, x, self.model.kernel.mask_id)

    def likely(self, x: Tensor, tries: int, generator: Generator | None) -> tuple[Tensor, Tensor]:
        """A path to each of x (B, L), chosen by p(path) / q(path | x_0) among `tries` of the forward process, and its
        `log_ratios`: nearly a draw from p(path | x_0)."""
        path = self.draw(x.repeat_interleave(tries, 0), generator)
        log_ratio = self.log_ratios(path)
        log_w = log_ratio.sum(0).view(-1, tries)
        chosen = inverse_cdf(weights(log_w), uniforms((len(x), 1), log_w, generator)).squeeze(-1)
        rows = tries * torch.arange(len(x), device=x.device) + chosen
        return path[:, rows], log_ratio[:, rows]

    def renoise(self, path: Tensor, log_ratio: Tensor, generator: Generator | None) -> Renoised:
        """Other paths to the same x_0, accepted by Metropolis-Hastings (Hastings, 1970), which leaves p(path) times any
        function of x_0 unchanged. A path that the model cannot take is left for any other."""
        other = self.draw(path[-1], generator)
        log_other, now = self.log_ratios(other), log_ratio.sum(0)
        log_odds = torch.where(now == -math.inf, math.inf, log_other.sum(0) - now)
        accepted = uniforms(tuple(log_odds.shape), log_odds, generator).log() <= log_odds
        return Renoised(
            torch.where(accepted.unsqueeze(-1), other, path), torch.where(accepted, log_other, log_ratio), accepted
        )

    def log_ratios(self, path: Tensor, first: int = 0) -> Tensor:
        """log p(x_s | x_t) - log q(x_s | x_t, x_0) of the steps from number `first` on, (T - first, B)."""
        model, rows, steps = self.model, path.shape[1], self.model.steps
        timeless = all(isinstance(m.denoiser, Timeless) and m.denoiser.ignores_time for m in model.networks)
        row_bytes = 3 * 4 * path.shape[-1] * model.vocab_size  # as `Diffusion.run_denoiser` guesses
        at_once = model.base.chunks.size(row_bytes, path.device) // rows if timeless else 1
        free, every = self.free(rows), torch.arange(rows, device=path.device)
        found: list[Tensor] = []
        for start in range(first, len(steps), max(1, at_once)):
            group = steps[start : start + max(1, at_once)]
            here, there = path[start : start + len(group)], path[start + 1 : start + 1 + len(group)]
            opened = here != there
            # A state where nothing opens needs no prediction; that of another row stands in and is not read.
            read = opened.any(-1).flatten()
            read[0] = True
            states = here.flatten(0, 1)
            query = located(model.networks, group[0].t, here[0])
            of = None if query.of is None else query.of.repeat(len(group))
            prediction = model.predict(states[read], Query(query.t, of).take(read))
            whole = replace(prediction.take(torch.where(read, read.cumsum(0) - 1, 0)), x=states)
            for k, step in enumerate(group):
                log_p = model.log_prob(there[k], here[k], whole.take(k * rows + every), step, None)
                masked = free & (there[k] == model.kernel.mask_id)
                log_stay = torch.where(masked, self.log_stay[start + k], 0.0)
                log_q = torch.where(opened[k], self.log_open[start + k], log_stay)
                found.append(log_p.double() - log_q.sum(-1))
        return torch.stack(found)
