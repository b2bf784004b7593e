"""Reverse kernels p(x_s | x_t) of the masked process, from a prediction of the clean data.

A masked site opens with some probability and then takes a token from the prediction mu; an open site keeps its token
or, with probability sigma, is masked again. With alpha_t the share of open sites at time t,

    masked:  open (alpha_s - (1 - sigma)·alpha_t) / (1 - alpha_t)      open:  stay 1 - sigma, mask sigma

keeps the marginals of the forward process for every sigma <= min(1, (1 - alpha_s)/alpha_t). The last step opens all
that is left. A low-confidence kernel opens chosen sites instead of random ones; p and q must share that choice, so it
is made once, by `choose`, and passed on as `sites`. `Interpolating` is the general process, with noise of any law.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Generator, Tensor

from tokensteer.core.domains import check_number, check_whole
from tokensteer.core.draws import NEVER, inverse_cdf, uniforms
from tokensteer.core.measure import Reveal, SiteMeasure, Sites, Table
from tokensteer.core.schedule import Linear, Schedule, Step
from tokensteer.core.tokens import Laws, row_by_row, tokens_of

NO_MASK = -1

Sigma = Callable[[Step, float], float]
Count = Callable[[Step, Tensor], Tensor]


class Kernel(Protocol):
    """p(x_s | x_t) as a measure, most often one that factorises over sites, given log p(x_0 | x_t).

    The prediction comes as `Tokens`, which hold a law for each site and spell out only what is read, or as a plain
    tensor (P, L, V); `tokens_of` makes the one of the other.
    """

    @property
    def mask_id(self) -> int:
        """The token that stands for what is not known; NO_MASK where any site may still change."""
        ...

    def choose(self, x: Tensor, log_x0: Laws, step: Step) -> Sites | None: ...
    def __call__(self, x: Tensor, log_x0: Laws, step: Step, sites: Sites | None = None) -> SiteMeasure: ...
    def survival(self, step: Step) -> float:
        """alpha_t / alpha_s, the probability that the forward process leaves a token alone between s and t."""
        ...

    def remasks(self, step: Step) -> bool:
        """Whether an open site may be masked again."""
        ...


@runtime_checkable
class Remembering(Protocol):
    """A kernel whose choice of sites depends on more than x_t: on noise drawn for the step, or on what went before.

    `remember` makes the memory at x_t (P, ...), None for none, from the parent's memory and prediction; it travels with
    the particle. `recall` is `choose` with it.
    """

    def remember(
        self, x: Tensor, before: Tensor | None, log_x0: Laws | None, generator: Generator | None
    ) -> Tensor | None: ...
    def recall(self, x: Tensor, log_x0: Laws, step: Step, memory: Tensor) -> Sites | None: ...


@runtime_checkable
class Ticking(Remembering, Protocol):
    """A kernel whose particles have clocks of their own, kept in their memory: the denoiser is asked at these times."""

    def times(self, memory: Tensor) -> Tensor:
        """When each particle moves, (P,)."""
        ...


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
        return _either((x == canvas).all(-1), 0.0, NEVER, like)

    def believe(self, x: Tensor, log_x0: Tensor, t: float | Tensor) -> Tensor:
        return log_x0


def noise_of(kernel: Kernel) -> Noise:
    """The noise that a kernel takes away."""
    return kernel if isinstance(kernel, Interpolating) else MaskNoise(kernel.mask_id)


def _log(p: float) -> float:
    return math.log(p) if p > 0 else NEVER


def _either(condition: Tensor, yes: float, no: float, like: Laws) -> Tensor:
    """where(condition, yes, no) in the precision of `like`: two bare numbers would be rounded to float32."""
    return torch.full(condition.shape, no, dtype=like.dtype, device=like.device).masked_fill_(condition, yes)


def no_remasking(step: Step, bound: float) -> float:
    """sigma = 0: ancestral sampling of the masked diffusion."""
    return 0.0


@dataclass(frozen=True)
class Cap:
    """ReMDM-cap: sigma = min(eta, bound)."""

    eta: float

    def __post_init__(self) -> None:
        check_number("Cap: eta", self.eta, "[0, 1]")

    def __call__(self, step: Step, bound: float) -> float:
        return min(self.eta, bound)


@dataclass(frozen=True)
class Rescale:
    """ReMDM-rescale: sigma = eta · bound."""

    eta: float

    def __post_init__(self) -> None:
        check_number("Rescale: eta", self.eta, "[0, 1]")

    def __call__(self, step: Step, bound: float) -> float:
        return self.eta * bound


@dataclass(frozen=True)
class Ancestral:
    """Ancestral sampling (MDM) and, with a remasking schedule `sigma`, ReMDM: `Ancestral(mask_id, sigma=Cap(0.1))`.

    `sigma(step, bound)` gets the largest value that keeps the marginals and must not exceed it.
    """

    mask_id: int
    schedule: Schedule = field(default_factory=Linear)
    sigma: Sigma = no_remasking

    def __post_init__(self) -> None:
        check_whole("Ancestral.mask_id", self.mask_id, 0)

    def _alphas(self, step: Step) -> tuple[float, float]:
        """alpha_t and alpha_s, where alpha is 1 at the end whatever the schedule says: nothing stays masked."""
        return self.schedule.alpha(step.t), 1.0 if step.s == 0 else self.schedule.alpha(step.s)

    def bound(self, step: Step) -> float:
        """The largest sigma that keeps the marginals; 1 where no site is open yet and sigma has no effect."""
        alpha_t, alpha_s = self._alphas(step)
        return min(1.0, (1.0 - alpha_s) / alpha_t) if alpha_t > 0 else 1.0

    def remasking(self, step: Step) -> float:
        """sigma at this step, checked against its bound."""
        bound = self.bound(step)
        sigma = self.sigma(step, bound)
        if not 0 <= sigma <= bound + 1e-12:
            raise ValueError(
                f"sigma at step {step.index} is {sigma:.6g} and must lie in [0, {bound:.6g}] to keep the marginals: "
                "use Cap(eta) or Rescale(eta), or take min(sigma, bound)"
            )
        return sigma

    def remasks(self, step: Step) -> bool:
        return self.remasking(step) > 0

    def survival(self, step: Step) -> float:
        alpha_t, alpha_s = self._alphas(step)
        return alpha_t / alpha_s

    def choose(self, x: Tensor, log_x0: Laws, step: Step) -> Tensor | None:
        return None

    def __call__(self, x: Tensor, log_x0: Laws, step: Step, sites: Tensor | None = None) -> Reveal:
        alpha_t, alpha_s = self._alphas(step)
        sigma = self.remasking(step)
        opens = min(1.0, (alpha_s - (1.0 - sigma) * alpha_t) / (1.0 - alpha_t))
        masked = x == self.mask_id
        log_stay = _either(masked, _log(1.0 - opens), _log(1.0 - sigma), log_x0)
        log_move = _either(masked, _log(opens), _log(sigma), log_x0)
        return Reveal(x, log_stay, log_move, tokens_of(log_x0), self.mask_id)


def evenly(step: Step, masked: Tensor) -> Tensor:
    """Open masked·(t - s)/t sites, at least one while any is left: a steady pace that ends with none masked."""
    return (masked * ((step.t - step.s) / step.t)).round().long().clamp(min=1)


@dataclass(frozen=True)
class LowConfidence:
    """Open the masked sites with the largest max_v mu^l(v); ties go to the lowest index.

    `count(step, masked)` says how many, from the number of masked sites of each row, (P,). The order depends on x_t
    alone, so the ratio p/q runs over the newly opened sites only.
    """

    mask_id: int
    count: Count = evenly

    def __post_init__(self) -> None:
        check_whole("LowConfidence.mask_id", self.mask_id, 0)

    def choose(self, x: Tensor, log_x0: Laws, step: Step) -> Tensor | None:
        masked = x == self.mask_id
        confidence = tokens_of(log_x0).each(lambda law: law.amax(-1), masked)
        order = confidence.sort(dim=-1, descending=True, stable=True).indices
        places = torch.arange(x.shape[-1], device=x.device).expand(x.shape)
        rank = torch.empty_like(order).scatter_(-1, order, places)
        return masked & (rank < self.count(step, masked.sum(-1)).unsqueeze(-1))

    def remasks(self, step: Step) -> bool:
        return False

    def survival(self, step: Step) -> float:
        return 1.0

    def __call__(self, x: Tensor, log_x0: Laws, step: Step, sites: Tensor | None = None) -> Reveal:
        if sites is None:
            sites = self.choose(x, log_x0, step)
        assert sites is not None
        log_stay = _either(sites, NEVER, 0.0, log_x0)
        log_move = _either(sites, 0.0, NEVER, log_x0)
        return Reveal(x, log_stay, log_move, tokens_of(log_x0), self.mask_id, sites)


@dataclass(frozen=True)
class Interpolating:
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
        fixed = _either(x == canvas, 0.0, NEVER, like)
        return torch.where(canvas == NO_MASK, self.law(like).log()[x], fixed).sum(-1)

    def choose(self, x: Tensor, log_x0: Laws, step: Step) -> Tensor | None:
        return None

    def remasks(self, step: Step) -> bool:
        return False

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
