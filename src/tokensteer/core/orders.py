"""Orders used in practice: which masked sites open next, and which open ones are masked again.

Orders by confidence rank the sites by what the prediction says of them. As long as the rank depends on x_t and on noise
that p and q share, the ratio p/q runs over the newly opened sites (`Ranked`).

`Blocks` runs any order block by block from left to right.
`remdm_loop` and `ConfidenceRemask` are the remaining remasking schedules of ReMDM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from tokensteer.core.domains import check_number, check_whole
from tokensteer.core.draws import NEVER
from tokensteer.core.kernel import (
    Ancestral,
    Count,
    Kernel,
    LowConfidence,
    Remembering,
    Sigma,
    Ticking,
    evenly,
    no_remasking,
)
from tokensteer.core.measure import Reveal, SiteMeasure, Sites
from tokensteer.core.ranking import Ranking, best_sites
from tokensteer.core.schedule import Step, uniform_steps
from tokensteer.core.tokens import Laws, tokens_of

Confidence = Callable[[Tensor], Tensor]


# ---- how many


def fixed(number: int) -> Count:
    """Open `number` sites at every step, and what is left at the last."""
    check_whole("fixed: number", number, hint="at least one site must open at each step")
    return lambda step, masked: masked if step.s == 0 else torch.full_like(masked, number)


def cosine_count(step: Step, masked: Tensor) -> Tensor:
    """MaskGIT's pace: a share cos(pi/2 · (1 - t)) of sites is masked at t; at least one opens while any is left."""
    left = math.sin(math.pi / 2 * step.s) / math.sin(math.pi / 2 * step.t)
    return (masked - (masked * left + 1e-9).floor().long()).clamp(min=1)


# ---- confidences: from log mu (K, V) to (K,), higher is surer


def max_probability(log_x0: Tensor) -> Tensor:
    """max_v log mu^l(v), the order of `LowConfidence`."""
    return log_x0.amax(-1)


def negative_entropy(log_x0: Tensor) -> Tensor:
    """sum_v mu^l(v) log mu^l(v)."""
    return torch.where(log_x0 == NEVER, 0.0, log_x0.exp() * log_x0).sum(-1)


def margin(log_x0: Tensor) -> Tensor:
    """mu^l(first) - mu^l(second), between the two most likely tokens."""
    first, second = log_x0.topk(2, -1).values.exp().unbind(-1)
    return first - second


@dataclass(frozen=True)
class Ranked:
    """Open the `count` masked sites of highest confidence, and every one whose confidence reaches `threshold`."""

    mask_id: int
    count: Count = evenly
    confidence: Confidence = max_probability
    threshold: float = math.inf

    def __post_init__(self) -> None:
        check_whole("Ranked.mask_id", self.mask_id, 0)
        check_number("Ranked.threshold", self.threshold, "[-inf, inf]")

    def choose(self, x: Tensor, log_x0: Laws, step: Step) -> Tensor | None:
        masked = x == self.mask_id
        scores = tokens_of(log_x0).each(self.confidence, masked)
        best = best_sites(scores, masked, self.count(step, masked.sum(-1)))
        return best | (masked & (scores >= self.threshold))

    def remasks(self, step: Step) -> bool:
        return False

    def survival(self, step: Step) -> float:
        return 1.0

    def __call__(self, x: Tensor, log_x0: Laws, step: Step, sites: Tensor | None = None) -> Reveal:
        sites = self.choose(x, log_x0, step) if sites is None else sites
        return LowConfidence(self.mask_id)(x, log_x0, step, sites)


# ---- blocks


@dataclass(frozen=True)
class Blocks:
    """Semi-autoregressive decoding: `kernel` inside one block of `size` sites after the other, from left to right.

    Each block takes an equal share of num_steps and sees its own time, from 1 to 0 along `grid`; sites outside stay as
    they are. Blocks are counted from `start`, behind a prompt; what is before it belongs to the first of them. Weights,
    particles and their resampling run on from block to block.
    """

    kernel: Kernel
    size: int
    length: int
    num_steps: int
    grid: Callable[[int], Sequence[Step]] = uniform_steps
    start: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.kernel, Ticking):
            raise ValueError(
                "Blocks: a block has its own time, and so have the particles of this kernel: use FirstHitting"
            )
        for name in ("size", "length", "num_steps"):
            check_whole(f"Blocks.{name}", getattr(self, name))
        check_whole("Blocks.start", self.start, 0)
        if not 0 <= self.start < self.length:
            raise ValueError(f"Blocks: start must be a site of the {self.length} there are, got {self.start}")
        if (self.length - self.start) % self.size:
            behind = f" behind the first {self.start} sites" if self.start else ""
            raise ValueError(f"Blocks: size {self.size} does not divide the length {self.length - self.start}{behind}")
        if self.num_steps % self.number:
            raise ValueError(
                f"Blocks: {self.num_steps} steps cannot be shared equally by {self.number} blocks of {self.size} "
                f"sites: use a multiple of {self.number}"
            )

    @property
    def number(self) -> int:
        return (self.length - self.start) // self.size

    @property
    def mask_id(self) -> int:
        return self.kernel.mask_id

    def within(self, step: Step) -> tuple[slice, Step]:
        """The sites of the block that this step works on, and the step in the block's own time."""
        if step.index >= self.num_steps or (step.s == 0) != (step.index == self.num_steps - 1):
            raise ValueError(
                f"Blocks was made for {self.num_steps} steps, and step {step.index} goes from t = {step.t:.4g} to "
                f"{step.s:.4g}: give the model as many steps"
            )
        each = self.num_steps // self.number
        block = step.index // each
        start = self.start + block * self.size
        return slice(start if block else 0, start + self.size), self.grid(each)[step.index % each]

    def choose(self, x: Tensor, log_x0: Laws, step: Step) -> Sites | None:
        block, inner = self.within(step)
        part = self.kernel.choose(x[:, block], tokens_of(log_x0).columns(block), inner)
        return self._spread(part, x, log_x0, block)

    def remember(
        self, x: Tensor, before: Tensor | None, log_x0: Laws | None, generator: Generator | None
    ) -> Tensor | None:
        return self.kernel.remember(x, before, log_x0, generator) if isinstance(self.kernel, Remembering) else None

    def recall(self, x: Tensor, log_x0: Laws, step: Step, memory: Tensor) -> Sites | None:
        assert isinstance(self.kernel, Remembering), "there is no memory without a kernel that remembers"
        block, inner = self.within(step)
        part = self.kernel.recall(x[:, block], tokens_of(log_x0).columns(block), inner, memory[:, block])
        return self._spread(part, x, log_x0, block)

    def _spread(self, part: Sites | None, x: Tensor, log_x0: Laws, block: slice) -> Sites | None:
        """What was chosen inside the block, on the whole canvas."""
        if part is None:
            return None
        if isinstance(part, Ranking):
            return part.within(log_x0, block)
        nowhere = NEVER if part.is_floating_point() else False
        sites = torch.full((*x.shape, *part.shape[2:]), nowhere, dtype=part.dtype, device=part.device)
        sites[:, block] = part
        return sites

    def remasks(self, step: Step) -> bool:
        return self.kernel.remasks(self.within(step)[1])

    def survival(self, step: Step) -> float:
        return 1.0

    def __call__(self, x: Tensor, log_x0: Laws, step: Step, sites: Sites | None = None) -> SiteMeasure:
        if x.shape[-1] != self.length:
            raise ValueError(f"Blocks was made for sequences of length {self.length}, got {x.shape[-1]}")
        block, inner = self.within(step)
        sites = self.choose(x, log_x0, step) if sites is None else sites
        outside = torch.ones_like(x, dtype=torch.bool)
        outside[:, block] = False
        return self.kernel(x, log_x0, inner, sites).pin(outside)


# ---- ReMDM


@dataclass(frozen=True)
class Loop:
    """alpha of ReMDM-loop: up to `alpha_on` until t = t_on, constant in [t_off, t_on], then up to 1."""

    t_on: float
    t_off: float
    alpha_on: float

    def __post_init__(self) -> None:
        if not 0 < self.t_off < self.t_on < 1 or not 0 < self.alpha_on < 1:
            raise ValueError(
                f"Loop needs 0 < t_off < t_on < 1 and 0 < alpha_on < 1, got t_off = {self.t_off}, t_on = {self.t_on}, "
                f"alpha_on = {self.alpha_on}"
            )

    def alpha(self, t: float) -> float:
        if t > self.t_on:
            return self.alpha_on * (1.0 - t) / (1.0 - self.t_on)
        return self.alpha_on if t >= self.t_off else 1.0 - (1.0 - self.alpha_on) * t / self.t_off

    def derivative(self, t: float) -> float:
        if t > self.t_on:
            return -self.alpha_on / (1.0 - self.t_on)
        return 0.0 if t >= self.t_off else -(1.0 - self.alpha_on) / self.t_off


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
    return Ancestral(mask_id, Loop(t_on, t_off, alpha_on), Window(sigma, t_on, t_off))


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
