"""Reverse kernels of the masked process: ancestral sampling (MDM) and remasking (ReMDM, Wang et al., 2025).

A masked site that opens takes a token from the prediction mu; an open site keeps its token or, with probability sigma,
is masked again. With alpha_t the share of open sites at time t,

    masked:  open (alpha_s - (1 - sigma)·alpha_t) / (1 - alpha_t)      open:  stay 1 - sigma, mask sigma

keeps the forward process's marginals for every sigma <= min(1, (1 - alpha_s)/alpha_t). The last step opens all sites.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor

from tokensteer.core.categorical.sites import Categoricals, by_site
from tokensteer.core.kernels.choices import Remasking
from tokensteer.core.kernels.kernel import MaskedKernel, Memory, Sigma, safe_log, where_like
from tokensteer.core.kernels.measure import Reveal
from tokensteer.core.kernels.schedule import Linear, LoopSchedule, Schedule, alphas
from tokensteer.core.numerics.domains import check_callable, check_flags, check_number
from tokensteer.core.numerics.draws import NEVER
from tokensteer.core.particles.path import Sites, Step


def no_remasking(step: Step, bound: float) -> float:
    """sigma = 0: ancestral sampling of the masked diffusion."""
    return 0.0


@dataclass(frozen=True)
class _Eta:
    eta: float

    def __post_init__(self) -> None:
        check_number(f"{type(self).__name__}: eta", self.eta, "[0, 1]")


class Cap(_Eta):
    """ReMDM-cap: sigma = min(eta, bound)."""

    def __call__(self, step: Step, bound: float) -> float:
        return min(self.eta, bound)


class Rescale(_Eta):
    """ReMDM-rescale: sigma = eta · bound."""

    def __call__(self, step: Step, bound: float) -> float:
        return self.eta * bound


@dataclass(frozen=True)
class Ancestral(MaskedKernel):
    """Ancestral sampling (MDM) and, with a remasking schedule `sigma`, ReMDM: `Ancestral(mask_id, sigma=Cap(0.1))`.

    `sigma(step, bound)` is given the largest value that keeps the marginals and must not exceed it.
    """

    schedule: Schedule = field(default_factory=Linear)
    sigma: Sigma = no_remasking

    def __post_init__(self) -> None:
        super().__post_init__()
        check_callable("Ancestral.sigma", self.sigma, "step and bound: Cap(0.1) is one")

    def bound(self, step: Step) -> float:
        """The largest sigma that keeps the marginals; 1 while no site is open and sigma has no effect."""
        alpha_t, alpha_s = alphas(self.schedule, step)
        return min(1.0, (1.0 - alpha_s) / alpha_t) if alpha_t > 0 else 1.0

    def remasking(self, step: Step) -> float:
        """sigma at this step, checked against its bound."""
        bound = self.bound(step)
        sigma = self.sigma(step, bound)
        check_number(f"sigma at step {step.index}", sigma, "[-inf, inf]")
        if not 0 <= sigma <= bound + 1e-12:
            raise ValueError(
                f"sigma at step {step.index} is {sigma:.6g} and must lie in [0, {bound:.6g}] to keep the marginals: "
                "use Cap(eta) or Rescale(eta), or take min(sigma, bound)"
            )
        return sigma

    def remasks(self, step: Step) -> bool:
        return self.remasking(step) > 0

    def survival(self, step: Step) -> float:
        alpha_t, alpha_s = alphas(self.schedule, step)
        return alpha_t / alpha_s

    def __call__(self, x: Tensor, log_x0: Categoricals, step: Step, sites: Sites | None = None) -> Reveal:
        alpha_t, alpha_s = alphas(self.schedule, step)
        sigma = self.remasking(step)
        opens = min(1.0, (alpha_s - (1.0 - sigma) * alpha_t) / (1.0 - alpha_t))
        masked = x == self.mask_id
        log_stay = where_like(masked, safe_log(1.0 - opens), safe_log(1.0 - sigma), log_x0)
        log_move = where_like(masked, safe_log(opens), safe_log(sigma), log_x0)
        return Reveal(x, log_stay, log_move, by_site(log_x0), self.mask_id)


@dataclass(frozen=True)
class Window:
    """`sigma` at steps that lie within [t_off, t_on], no remasking at others."""

    sigma: Sigma
    t_on: float
    t_off: float

    def __post_init__(self) -> None:
        check_number("Window.t_off", self.t_off, "[0, 1]")
        check_number("Window.t_on", self.t_on, f"[{self.t_off}, 1]")

    def __call__(self, step: Step, bound: float) -> float:
        return self.sigma(step, bound) if step.t <= self.t_on and step.s >= self.t_off else 0.0


def remdm_loop(mask_id: int, t_on: float, t_off: float, alpha_on: float, sigma: Sigma) -> Ancestral:
    """ReMDM-loop: no remasking until a share `alpha_on` is open, remasking at that share, no remasking to the end."""
    return Ancestral(mask_id, LoopSchedule(t_on, t_off, alpha_on), Window(sigma, t_on, t_off))


@dataclass(frozen=True)
class ConfidenceRemask:
    """ReMDM-conf: open site l is masked again with probability sigma · softmax(-sharpness · psi)_l.

    The softmax runs over open sites and sigma is that of `base`. Masked sites open as without remasking, so the
    marginals are not kept. psi^l is the probability that the token had when it was opened, carried with the particle;
    a prompt's tokens are never masked. With `carried=False` it is mu^l(x^l | x_t), which needs no memory but a denoiser
    that predicts open sites too: one that copies its input is equally sure of all. Fixed sites are then not told apart,
    so a prompt or padding takes a share of sigma without effect. p and q share the log-probabilities of remasking.
    """

    base: Ancestral
    sharpness: float = 1.0
    carried: bool = True

    def __post_init__(self) -> None:
        check_number("ConfidenceRemask.sharpness", self.sharpness)
        check_flags(self)

    @property
    def mask_id(self) -> int:
        return self.base.mask_id

    def remasks(self, step: Step) -> bool:
        return self.base.remasks(step)

    def survival(self, step: Step) -> float:
        return self.base.survival(step)

    def remember(self, x: Tensor, before: Memory, log_x0: Categoricals | None, generator: Generator | None) -> Memory:
        return carried_confidence(x, self.mask_id, before, log_x0) if self.carried else None

    def recall(self, x: Tensor, log_x0: Categoricals, step: Step, memory: Tensor) -> Remasking:
        sigma, stays = self.base.remasking(step), (x == self.mask_id) | (memory == math.inf)
        log_share = (-self.sharpness * memory).masked_fill(stays, NEVER).log_softmax(-1)
        return Remasking((log_share + safe_log(sigma)).masked_fill(stays, NEVER).to(log_x0.dtype))

    def choose(self, x: Tensor, log_x0: Categoricals, step: Step) -> Remasking:
        return self.recall(x, log_x0, step, current_confidence(x, log_x0, self.mask_id))

    def __call__(self, x: Tensor, log_x0: Categoricals, step: Step, sites: Sites | None = None) -> Reveal:
        remasking = self.choose(x, log_x0, step) if sites is None else Remasking.of(sites)
        plain = replace(self.base, sigma=no_remasking)(x, log_x0, step)
        return replace(
            plain,
            log_stay=torch.where(plain.masked, plain.log_stay, torch.log1p(-remasking.log_p.exp())),
            log_move=torch.where(plain.masked, plain.log_move, remasking.log_p),
            sites=remasking,
        )


def current_confidence(x: Tensor, log_x0: Categoricals, mask_id: int) -> Tensor:
    """mu^l(x^l | x_t), the probability of the current token, (P, L); 1 at masked sites."""
    return by_site(log_x0).entry(x, x != mask_id).exp()


def carried_confidence(x: Tensor, mask_id: int, before: Tensor | None, prediction: Categoricals | None) -> Tensor:
    """The probability that each token had when it was last opened, (P, L), from the parent's and its prediction.

    NaN at masked sites, +inf (never remasked) at the tokens of a prompt."""
    masked = x == mask_id
    if before is None or prediction is None:
        psi = torch.full_like(x, math.inf, dtype=torch.get_default_dtype())
    else:
        psi = torch.where(before.isnan(), current_confidence(x, prediction, mask_id), before.to(prediction.dtype))
    return psi.masked_fill(masked, math.nan)
