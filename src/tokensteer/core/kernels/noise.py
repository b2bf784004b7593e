"""Noise of any law: masks, uniform tokens, or any distribution over the vocabulary.

`Interpolating` is the general process. With the mask as its noise it is `Ancestral`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from tokensteer.core.categorical.sites import Laws, row_by_row
from tokensteer.core.kernels.kernel import NO_MASK, Kernel, PlainKernel, choice_of
from tokensteer.core.kernels.measure import Table
from tokensteer.core.kernels.schedule import Linear, Schedule
from tokensteer.core.numerics.domains import check_number, check_whole
from tokensteer.core.numerics.draws import NEVER, inverse_cdf, uniforms
from tokensteer.core.particles.path import Step


class Noise(Protocol):
    """What hides the data: where a canvas starts from, and what its visible tokens give away.

    A canvas (P, L) holds the kernel's mask_id at its free sites and tokens at the fixed ones.
    """

    def begin(self, canvas: Tensor, generator: Generator | None) -> Tensor: ...
    def log_begin(self, x: Tensor, canvas: Tensor, like: Tensor) -> Tensor:
        """The log-probability of beginning at x, (P,), in the precision of `like`."""
        ...

    def believe(self, x: Tensor, log_x0: Tensor, t: float | Tensor) -> Tensor:
        """The prediction made to agree with what x_t shows."""
        ...


@dataclass(frozen=True)
class MaskNoise:
    """All masks at the start; what is visible is carried over, so the prediction there is not read."""

    mask_id: int

    def begin(self, canvas: Tensor, generator: Generator | None) -> Tensor:
        return canvas.clone()

    def log_begin(self, x: Tensor, canvas: Tensor, like: Tensor) -> Tensor:
        return choice_of((x == canvas).all(-1), 0.0, NEVER, like)

    def believe(self, x: Tensor, log_x0: Tensor, t: float | Tensor) -> Tensor:
        return log_x0


def noise_of(kernel: Kernel) -> Noise:
    """The noise that a kernel takes away."""
    return kernel if isinstance(kernel, Interpolating) else MaskNoise(kernel.mask_id)


@dataclass(frozen=True)
class Interpolating(PlainKernel):
    """Noise of any law v, (V,): x_t is x_0 with probability alpha_t and a draw from v otherwise, site by site.

    p(x_s = w | x_t = z) = q(z | w) · sum_v mu(v) q(w | v) / q(z | v), with q the forward process. Uniform noise is
    v = 1/V; with v the mask this is `Ancestral`. Free sites of the template are marked by NO_MASK.
    """

    prior: tuple[float, ...]
    schedule: Schedule = field(default_factory=Linear)
    mask_id: int = field(default=NO_MASK, init=False)
    _laws: dict[Any, Tensor] = field(default_factory=dict[Any, Tensor], init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for k, mass in enumerate(self.prior):
            check_number(f"Interpolating: prior[{k}]", mass, "[0, inf)")
        if abs(sum(self.prior) - 1.0) > 1e-6:
            raise ValueError(
                f"Interpolating: the prior must be a law over the vocabulary, and sums to {sum(self.prior)}"
            )

    def law(self, like: Tensor) -> Tensor:
        """v as a tensor, (V,), made once: it is wanted several times a step, and takes a while to bring to a GPU."""
        kind = like.dtype, like.device
        if kind not in self._laws:
            with torch.inference_mode(False):  # others may want to differentiate
                self._laws[kind] = torch.tensor(self.prior, dtype=like.dtype, device=like.device)
        return self._laws[kind]

    def begin(self, canvas: Tensor, generator: Generator | None) -> Tensor:
        u = uniforms(tuple(canvas.shape), canvas, generator)
        return torch.where(canvas == NO_MASK, inverse_cdf(self.law(u), u.view(-1)).view_as(canvas), canvas)

    def log_begin(self, x: Tensor, canvas: Tensor, like: Tensor) -> Tensor:
        fixed = choice_of(x == canvas, 0.0, NEVER, like)
        return torch.where(canvas == NO_MASK, self.law(like).log()[x], fixed).sum(-1)

    def survival(self, step: Step) -> float:
        return self.schedule.alpha(step.t) / self._alpha_s(step)

    def _alpha_s(self, step: Step) -> float:
        return 1.0 if step.s == 0 else self.schedule.alpha(step.s)

    def believe(self, x: Tensor, log_x0: Tensor, t: float | Tensor) -> Tensor:
        """A token that noise never makes must be the clean one."""
        only = torch.full_like(log_x0, NEVER).scatter(-1, x.unsqueeze(-1), 0.0)
        return torch.where(self.law(log_x0)[x].unsqueeze(-1) > 0, log_x0, only)

    def _forward(self, x: Tensor, survival: float, like: Tensor) -> Tensor:
        """q(z | w) = survival · 1{w = z} + (1 - survival) · v(z) for every w that x = z may come from, (P, L, V)."""
        v = self.law(like)
        here = torch.nn.functional.one_hot(x, len(v)).to(v.dtype)
        return survival * here + (1.0 - survival) * v[x].unsqueeze(-1)

    def log_pace(self, x: Tensor, step: Step, like: Tensor) -> Tensor:
        """What the schedule alone makes of p(x_s = w | x_t = z), the log of q(z | w) · f_s(w) / f_t(z), (P, L, V).

        f_t(z) = alpha_t + (1 - alpha_t) · v(z), without the first term if z is the only noise there is, as a mask is.
        It cancels from step to step but for the start, which is v, and the end, which is 1 for all tokens, so that the
        paces of a whole path make the law of the noise that leads back along it. With v the mask they are the
        probabilities of opening, staying masked and staying open.
        """
        alpha_s, survival, v = self._alpha_s(step), self.survival(step), self.law(like)
        at_s, at_t = (alpha * (v < 1).to(v) + (1.0 - alpha) * v for alpha in (alpha_s, alpha_s * survival))
        at_s = torch.ones_like(v) if step.s == 0 else at_s
        return (self._forward(x, survival, like) * at_s).log() - at_t[x].log().unsqueeze(-1)

    def __call__(self, x: Tensor, log_x0: Laws, step: Step, sites: Tensor | None = None) -> Table:
        return Table(row_by_row(lambda rows, log_x0: self._log_arrivals(x[rows], log_x0, step), log_x0), x=x)

    def _log_arrivals(self, x: Tensor, log_x0: Tensor, step: Step) -> Tensor:
        """log p(x_s = w | x_t) for every w, (P, L, V)."""
        alpha_s, survival, v = self._alpha_s(step), self.survival(step), self.law(log_x0)
        mu = self.believe(x, log_x0, step.t).exp()
        from_clean = self._forward(x, alpha_s * survival, log_x0)
        from_next = self._forward(x, survival, log_x0)
        share = torch.where(from_clean > 0, mu / torch.where(from_clean > 0, from_clean, 1.0), 0.0)
        arrive = alpha_s * share + (1.0 - alpha_s) * v * share.sum(-1, keepdim=True)
        return (from_next * arrive).log()


def uniform_noise(vocab_size: int, schedule: Schedule | None = None) -> Interpolating:
    """Every token equally likely as noise."""
    check_whole("uniform_noise: vocab_size", vocab_size)
    return Interpolating((1.0 / vocab_size,) * vocab_size, Linear() if schedule is None else schedule)
