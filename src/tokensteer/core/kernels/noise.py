"""Noise: masks, uniform tokens, or any distribution over the vocabulary.

`Interpolating` is the general process. With the mask as its noise it is `Ancestral`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from tokensteer.core.categorical.sites import Categoricals, map_rows
from tokensteer.core.kernels.kernel import NO_MASK, Kernel, PlainKernel, where_like
from tokensteer.core.kernels.measure import Table
from tokensteer.core.kernels.schedule import Linear, Schedule, alphas
from tokensteer.core.numerics.domains import check_number, check_whole
from tokensteer.core.numerics.draws import NEVER, inverse_cdf, uniforms
from tokensteer.core.particles.path import Sites, Step


@dataclass(frozen=True)
class MaskNoise:
    """All masks at the start. A canvas (P, L) holds the kernel's mask_id at free sites and tokens at fixed ones."""

    mask_id: int

    def begin(self, canvas: Tensor, generator: Generator | None) -> Tensor:
        return canvas.clone()

    def log_begin(self, x: Tensor, canvas: Tensor, like: Tensor) -> Tensor:
        """The log-probability of starting at x, (P,), in the dtype of `like`."""
        return where_like((x == canvas).all(-1), 0.0, NEVER, like)

    def condition(self, x: Tensor, log_x0: Tensor, t: float | Tensor) -> Tensor:
        """The prediction, conditioned on tokens of x_t that cannot be noise. Visible tokens are kept, so the prediction
        there is not read."""
        return log_x0


@dataclass(frozen=True)
class Interpolating(PlainKernel):
    """Noise of any distribution v, (V,): at each site x_t is x_0 with probability alpha_t, else a draw from v.

    p(x_s = w | x_t = z) = q(z | w) · sum_v mu(v) q(w | v) / q(z | v), with q the forward process. Uniform noise is
    v = 1/V; with v the mask this is `Ancestral`. NO_MASK marks the free sites of the template.
    """

    prior: tuple[float, ...]
    schedule: Schedule = field(default_factory=Linear)
    mask_id: int = field(default=NO_MASK, init=False)
    _tensors: dict[tuple[torch.dtype, torch.device], Tensor] = field(
        default_factory=dict[tuple[torch.dtype, torch.device], Tensor], init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for k, mass in enumerate(self.prior):
            check_number(f"Interpolating: prior[{k}]", mass, "[0, inf)")
        if abs(sum(self.prior) - 1.0) > 1e-6:
            total = sum(self.prior)
            raise ValueError(
                f"Interpolating: the prior must be a distribution over the vocabulary, and sums to {total}"
            )

    def law(self, like: Tensor) -> Tensor:
        """v as a tensor, (V,), cached: it is used several times a step, and copying it to a GPU is slow."""
        kind = like.dtype, like.device
        if kind not in self._tensors:
            with torch.inference_mode(False):  # later uses may need gradients
                self._tensors[kind] = torch.tensor(self.prior, dtype=like.dtype, device=like.device)
        return self._tensors[kind]

    def begin(self, canvas: Tensor, generator: Generator | None) -> Tensor:
        u = uniforms(tuple(canvas.shape), canvas, generator)
        return torch.where(canvas == NO_MASK, inverse_cdf(self.law(u), u.view(-1)).view_as(canvas), canvas)

    def log_begin(self, x: Tensor, canvas: Tensor, like: Tensor) -> Tensor:
        fixed = where_like(x == canvas, 0.0, NEVER, like)
        return torch.where(canvas == NO_MASK, self.law(like).log()[x], fixed).sum(-1)

    def survival(self, step: Step) -> float:
        alpha_t, alpha_s = alphas(self.schedule, step)
        return alpha_t / alpha_s

    def condition(self, x: Tensor, log_x0: Tensor, t: float | Tensor) -> Tensor:
        """A token without mass under v must be the clean one."""
        only = torch.full_like(log_x0, NEVER).scatter(-1, x.unsqueeze(-1), 0.0)
        return torch.where(self.law(log_x0)[x].unsqueeze(-1) > 0, log_x0, only)

    def _forward(self, x: Tensor, survival: float, like: Tensor) -> Tensor:
        """q(z | w) = survival · 1{w = z} + (1 - survival) · v(z) at z = x for every w, (P, L, V)."""
        v = self.law(like)
        here = torch.nn.functional.one_hot(x, len(v)).to(v.dtype)
        return survival * here + (1.0 - survival) * v[x].unsqueeze(-1)

    def log_pace(self, x: Tensor, step: Step, like: Tensor) -> Tensor:
        """log of q(z | w) · f_s(w) / f_t(z), (P, L, V): what the schedule alone determines of p(x_s = w | x_t = z).

        f_t(z) = alpha_t + (1 - alpha_t) · v(z), without the first term if v(z) = 1, as for a mask. f cancels from step
        to step except at the start, where it is v, and the end, where it is 1, so the product along a path is the
        probability of the noise that leads back along it. With v the mask these are the probabilities of opening,
        staying masked and staying open.
        """
        alpha_s, survival, v = alphas(self.schedule, step)[1], self.survival(step), self.law(like)
        at_s, at_t = (alpha * (v < 1).to(v) + (1.0 - alpha) * v for alpha in (alpha_s, alpha_s * survival))
        at_s = torch.ones_like(v) if step.s == 0 else at_s
        return (self._forward(x, survival, like) * at_s).log() - at_t[x].log().unsqueeze(-1)

    def __call__(self, x: Tensor, log_x0: Categoricals, step: Step, sites: Sites | None = None) -> Table:
        return Table(map_rows(lambda rows, log_x0: self._log_arrivals(x[rows], log_x0, step), log_x0), x=x)

    def _log_arrivals(self, x: Tensor, log_x0: Tensor, step: Step) -> Tensor:
        """log p(x_s = w | x_t) for every w, (P, L, V)."""
        alpha_s, survival, v = alphas(self.schedule, step)[1], self.survival(step), self.law(log_x0)
        mu = self.condition(x, log_x0, step.t).exp()
        from_clean = self._forward(x, alpha_s * survival, log_x0)
        from_next = self._forward(x, survival, log_x0)
        share = torch.where(from_clean > 0, mu / torch.where(from_clean > 0, from_clean, 1.0), 0.0)
        arrive = alpha_s * share + (1.0 - alpha_s) * v * share.sum(-1, keepdim=True)
        return (from_next * arrive).log()


Noise = MaskNoise | Interpolating


def noise_of(kernel: Kernel) -> Noise:
    """The noise that a kernel removes."""
    return kernel if isinstance(kernel, Interpolating) else MaskNoise(kernel.mask_id)


def uniform_noise(vocab_size: int, schedule: Schedule | None = None) -> Interpolating:
    """Noise in which every token is equally likely."""
    check_whole("uniform_noise: vocab_size", vocab_size)
    return Interpolating((1.0 / vocab_size,) * vocab_size, Linear() if schedule is None else schedule)
