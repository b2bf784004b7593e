"""Reverse kernels of the masked process: ancestral sampling (MDM) and remasking (ReMDM, Wang et al., 2025).

A masked site opens with some probability and then takes a token from the prediction mu; an open site keeps its token
or, with probability sigma, is masked again. With alpha_t the share of open sites at time t,

    masked:  open (alpha_s - (1 - sigma)·alpha_t) / (1 - alpha_t)      open:  stay 1 - sigma, mask sigma

keeps the marginals of the forward process for every sigma <= min(1, (1 - alpha_s)/alpha_t). The last step opens all
sites that are left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor

from tokensteer.core.categorical.sites import Laws, tokens_of
from tokensteer.core.kernels.kernel import PlainKernel, Sigma, choice_of, log_or_never
from tokensteer.core.kernels.measure import Reveal
from tokensteer.core.kernels.schedule import Linear, LoopSchedule, Schedule
from tokensteer.core.numerics.domains import check_number, check_whole
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.particles.path import Step


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
class Ancestral(PlainKernel):
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

    def __call__(self, x: Tensor, log_x0: Laws, step: Step, sites: Tensor | None = None) -> Reveal:
        alpha_t, alpha_s = self._alphas(step)
        sigma = self.remasking(step)
        opens = min(1.0, (alpha_s - (1.0 - sigma) * alpha_t) / (1.0 - alpha_t))
        masked = x == self.mask_id
        log_stay = choice_of(masked, log_or_never(1.0 - opens), log_or_never(1.0 - sigma), log_x0)
        log_move = choice_of(masked, log_or_never(opens), log_or_never(sigma), log_x0)
        return Reveal(x, log_stay, log_move, tokens_of(log_x0), self.mask_id)


@dataclass(frozen=True)
class Window:
    """`sigma` for steps that lie within [t_off, t_on], no remasking before and after."""

    sigma: Sigma
    t_on: float
    t_off: float

    def __post_init__(self) -> None:
        check_number("Window.t_off", self.t_off, "[0, 1]")
        check_number("Window.t_on", self.t_on, f"[{self.t_off}, 1]")

    def __call__(self, step: Step, bound: float) -> float:
        return self.sigma(step, bound) if step.t <= self.t_on and step.s >= self.t_off else 0.0


def remdm_loop(mask_id: int, t_on: float, t_off: float, alpha_on: float, sigma: Sigma) -> Ancestral:
    """ReMDM-loop: plain until a share `alpha_on` is open, then mask and reopen at that share, then plain to the end."""
    return Ancestral(mask_id, LoopSchedule(t_on, t_off, alpha_on), Window(sigma, t_on, t_off))


def now_confidence(x: Tensor, log_x0: Laws, mask_id: int) -> Tensor:
    """mu^l(x^l | x_t), what the prediction says now of the token that stands there, (P, L); 1 at masked sites."""
    return tokens_of(log_x0).entry(x, x != mask_id).exp()


@dataclass(frozen=True)
class ConfidenceRemask:
    """ReMDM-conf: open site l is masked again with probability sigma · softmax(-sharpness · psi)_l.

    The softmax runs over open sites and sigma is that of `base`; masked sites open as without remasking, so the
    marginals are not kept. psi^l is the probability that the token had when it was opened, carried with the particle
    (a prompt's tokens are never masked). With `carried=False` it is mu^l(x^l | x_t), which needs no memory, but a
    denoiser that has a say at open sites: one that copies its input there finds all equally sure. Nothing then tells
    fixed sites from others, so that a prompt, or padding, takes its share of sigma in vain. `sites` are the
    log-probabilities of remasking (P, L), shared by p and q.
    """

    base: Ancestral
    sharpness: float = 1.0
    carried: bool = True

    def __post_init__(self) -> None:
        check_number("ConfidenceRemask.sharpness", self.sharpness)

    @property
    def mask_id(self) -> int:
        return self.base.mask_id

    def remasks(self, step: Step) -> bool:
        return self.base.remasks(step)

    def survival(self, step: Step) -> float:
        return self.base.survival(step)

    def remember(
        self, x: Tensor, before: Tensor | None, log_x0: Laws | None, generator: Generator | None
    ) -> Tensor | None:
        return remember(x, self.mask_id, before, log_x0) if self.carried else None

    def recall(self, x: Tensor, log_x0: Laws, step: Step, memory: Tensor) -> Tensor | None:
        sigma, stays = self.base.remasking(step), (x == self.mask_id) | (memory == math.inf)
        log_share = (-self.sharpness * memory).masked_fill(stays, NEVER).log_softmax(-1)
        return (log_share + (math.log(sigma) if sigma > 0 else NEVER)).masked_fill(stays, NEVER).to(log_x0.dtype)

    def choose(self, x: Tensor, log_x0: Laws, step: Step) -> Tensor | None:
        return self.recall(x, log_x0, step, now_confidence(x, log_x0, self.mask_id))

    def __call__(self, x: Tensor, log_x0: Laws, step: Step, sites: Tensor | None = None) -> Reveal:
        log_sigma = self.choose(x, log_x0, step) if sites is None else sites
        assert log_sigma is not None
        plain = replace(self.base, sigma=no_remasking)(x, log_x0, step)
        return replace(
            plain,
            log_stay=torch.where(plain.masked, plain.log_stay, torch.log1p(-log_sigma.exp())),
            log_move=torch.where(plain.masked, plain.log_move, log_sigma),
            sites=log_sigma,
        )


def remember(x: Tensor, mask_id: int, before: Tensor | None, prediction: Laws | None) -> Tensor:
    """psi carried with the particle: the probability each token had when it was last opened, (P, L).

    NaN at masked sites, +inf (never remasked) for the tokens of a prompt. `before` and `prediction` are the parent's.
    """
    masked = x == mask_id
    if before is None or prediction is None:
        psi = torch.full_like(x, math.inf, dtype=torch.get_default_dtype())
        return psi.masked_fill(masked, math.nan)
    psi = torch.where(before.isnan(), now_confidence(x, prediction, mask_id), before.to(prediction.dtype))
    return psi.masked_fill(masked, math.nan)
