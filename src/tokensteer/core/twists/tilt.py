"""Tilts: the target p(x_0) · exp(r(x_0)/kl), and the twists that lead there (Whiteley and Lee, 2014; Wu et al., 2023;
docs/references.md).

On the way particles follow p(x_t) · exp(psi_t(x_t)) with the log-twist psi_t = ramp(t)/kl · r_hat(x_t). Any finite
psi_t is correct as long as psi_0 = r/kl exactly, so r_hat may be a crude or random estimate
(`core.twists.estimators`). A random estimate is drawn once and travels with its particle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Generator, Tensor

from tokensteer.core.models.context import Context, as_tensors, context_rows, population_of
from tokensteer.core.models.validation import unwritten
from tokensteer.core.numerics.batching import Chunks, Meter
from tokensteer.core.numerics.domains import check_callable, check_flags, check_number, check_whole
from tokensteer.core.numerics.draws import replace_neg_inf
from tokensteer.core.particles.path import Evaluation
from tokensteer.core.twists.estimators import Average, NoisyState, Relaxed, Sampled, SoftInput, log_mean_exp
from tokensteer.core.twists.potentials import Potential, difference
from tokensteer.core.twists.ramps import Adaptive, Ramp
from tokensteer.core.twists.ramps import linear as linear_ramp

Reward = Callable[..., Tensor]  # clean sequences, and the rows of the context if the tilt has one
LogLookahead = Callable[["Tilt", NoisyState], Tensor]


class Estimator(Protocol):
    """r_hat(x_t), (P,). A `random` one needs a generator. One that is `Timeless` depends on x_t and the prediction
    alone, so a particle that has not moved keeps its estimate, noise included."""

    @property
    def random(self) -> bool: ...
    def __call__(self, tilt: Tilt, state: NoisyState, generator: Generator | None) -> Tensor: ...


@runtime_checkable
class Drawing(Protocol):
    """An estimator that averages over `Tilt.draws` clean sequences if `drawn`."""

    @property
    def drawn(self) -> bool: ...
    def with_draws(self, draws: int) -> Estimator:
        """The same estimator for another number of draws."""
        ...


@dataclass(frozen=True)
class Tilt:
    """The target p(x_0) · exp(reward(x_0)/kl), and the estimates that lead there.

    `reward` maps clean ids (P, L) to (P,); if `differentiable`, it also takes one-hots (P, L, V). A reward of -inf is a
    hard constraint. An estimate of -inf before the end only means that no draw met the constraint: it counts as a
    log-twist of ramp(t) · `floor`, since the sequence may still recover. `ramp` is a function of t, or
    `Adaptive(share)`. `log_lookahead` is a finite term of the log-twist before the end that the ramp does not scale,
    such as the log-probability that a constraint will be met. `context` is what the reward depends on beside the
    sequence, such as the vector of a prompt: tensors with one row for all populations or one for each, as in
    `Diffusion`. The reward is called with the rows of its sequences as further arguments.

    `smoothing` is the share of a particle's last estimate that stays in its next one, from the step before: the twist
    is then an average over the particle's recent steps, with less noise. None is 0, or what the method chooses.
    """

    reward: Reward
    kl: float = 1.0
    ramp: Ramp | Adaptive = linear_ramp
    draws: int = 1
    average: Average = log_mean_exp
    estimator: Estimator = field(default_factory=Sampled)
    potential: Potential = difference
    differentiable: bool = False
    floor: float = -2.0
    log_lookahead: LogLookahead | None = None
    context: Tensor | Sequence[Tensor] | None = None
    smoothing: float | None = None
    meter: Meter = field(default_factory=Meter, init=False, repr=False, compare=False)
    chunks: Chunks = field(default_factory=Chunks, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.reward):
            raise TypeError(f"Tilt.reward must be a function of clean sequences (P, L), got {self.reward!r}")
        if not isinstance(self.ramp, Adaptive) and not callable(self.ramp):
            raise ValueError(f"Tilt.ramp must be a function of t, got {self.ramp!r}; try ramps.linear")
        end = 1.0 if isinstance(self.ramp, Adaptive) else self.ramp(0.0)
        check_number("Tilt.ramp(0)", end, "[-inf, inf]")
        if not abs(end - 1.0) <= 1e-9:
            raise ValueError(f"Tilt.ramp(0) must be 1, got {end:.6g}: the final target would not be exp(r/kl)")
        check_number("Tilt.kl", self.kl, "(0, inf)", "it divides the reward")
        check_whole("Tilt.draws", self.draws)
        check_flags(self)
        check_callable("Tilt.average", self.average, "rewards, log-weights and kl: estimators.mean is one")
        if self.log_lookahead is not None:
            check_callable("Tilt.log_lookahead", self.log_lookahead, "a tilt and a NoisyState")
        object.__setattr__(self, "context", as_tensors(self.context))
        if self.smoothing is not None:
            check_number("Tilt.smoothing", self.smoothing, "[0, 1)", "0 takes each estimate as it is")
        check_number("Tilt.floor", self.floor, hint="a log-twist of -inf would lose what can still recover")
        if not isinstance(self.potential, Potential):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"Tilt.potential must be a Potential, got {self.potential!r}: wrap a function as Potential(function)"
            )
        if isinstance(self.estimator, SoftInput | Relaxed) and not self.differentiable:
            raise ValueError(
                f"{type(self.estimator).__name__} gives the reward one-hots that are no sequence: set "
                "differentiable=True if it can take them, or use Sampled()"
            )

    def with_draws(self, draws: int) -> Tilt:
        """The same tilt with another number of draws. It shares this tilt's meter and memory budget."""
        estimator = self.estimator
        estimator = estimator.with_draws(draws) if isinstance(estimator, Drawing) else estimator
        return self._shared(replace(self, draws=draws, estimator=estimator))

    def with_ramp(self, ramp: Ramp | Adaptive) -> Tilt:
        """The same tilt with another ramp. It shares this tilt's meter and memory budget."""
        return self._shared(replace(self, ramp=ramp))

    def with_smoothing(self, smoothing: float | None) -> Tilt:
        """The same tilt with another smoothing. It shares this tilt's meter and memory budget."""
        return self._shared(replace(self, smoothing=smoothing))

    def _shared(self, other: Tilt) -> Tilt:
        object.__setattr__(other, "meter", self.meter)
        object.__setattr__(other, "chunks", self.chunks)
        return other

    @property
    def conditions(self) -> Context:
        """The tensors of the context."""
        return cast("Context", self.context)

    @property
    def populations(self) -> int:
        """The number of contexts; 1 if the reward is the same for all populations."""
        return max((len(part) for part in self.conditions), default=1)

    def located(self, x: Tensor) -> Tensor | None:
        """The population of each of the particles x in order, (P,), if contexts differ between populations."""
        return population_of(x, self.populations) if self.populations > 1 else None

    @property
    def drawn(self) -> bool:
        """Whether estimates average over draws, with fresh or shared noise."""
        return isinstance(self.estimator, Drawing) and self.estimator.drawn

    @property
    def reusable(self) -> bool:
        """Whether a particle that has not moved may keep its estimate. Where a potential accumulates estimates, noise
        must be fresh: the same noise, counted again at each step, would not average out."""
        return self.potential.memoryless or not self.estimator.random

    # ---- the ramp

    def scale(self, t: float, chosen: Tensor | None = None) -> float | Tensor:
        """ramp(t)/kl, exactly 1/kl at the end. An adaptive ramp takes the lambdas `chosen` (P,); 0 before the first."""
        if t == 0:
            return 1.0 / self.kl
        if isinstance(self.ramp, Adaptive):
            return 0.0 if chosen is None else chosen / self.kl
        return self.ramp(t) / self.kl

    def aim(self, t: float, evaluation: Evaluation) -> Tensor:
        """The scale that a proposal expects at time t, (P,); for an adaptive ramp, the last one chosen."""
        like, scale = evaluation.log_twist, self.scale(t, evaluation.ramp)
        return scale.to(like).expand_as(like) if isinstance(scale, Tensor) else torch.full_like(like, scale)

    def adapt(
        self, t: float, r: Tensor, parent: Evaluation | None, log_lookahead: Tensor | float = 0.0
    ) -> Tensor | None:
        """The lambda (P,) that an adaptive ramp chooses for estimates r: 0 at the start, 1 at the end; else None."""
        if not isinstance(self.ramp, Adaptive):
            return None
        nothing = torch.zeros_like(r)
        if t == 0:
            return nothing + 1.0
        before = nothing if parent is None or parent.ramp is None else parent.ramp
        if parent is None or parent.pending is None:
            return before  # no population to adapt to
        least = nothing if self.potential.factors else before
        return self.ramp.choose(
            parent.pending, least, lambda ramp: self.potential(ramp / self.kl, r, parent)[0] + log_lookahead
        )

    # ---- the log-twist

    def idle(self, t: float, parent: Evaluation | None = None) -> bool:
        """Whether the ramp is 0 at time t and the potential skips estimates there."""
        nothing = parent is None if isinstance(self.ramp, Adaptive) else t != 0 and self.ramp(t) == 0
        return nothing and (self.potential.memoryless or self.potential.factors)

    def rests(self, t: float, parent: Evaluation | None, weighed: bool) -> bool:
        """Whether no estimate is made at time t: the tilt is idle, or memoryless where no weight is read."""
        return (not weighed and parent is not None and self.potential.memoryless) or self.idle(t, parent)

    def weigh(self, known: Evaluation, t: float, parent: Evaluation | None, weighed: bool) -> Evaluation:
        """The evaluation with its log-twist. Without an estimate, that of the parent is kept: increments telescope. An
        estimate made where the tilt rests is not counted, since its presence depends on which particles moved."""
        log_lookahead = 0.0 if known.log_lookahead is None else known.log_lookahead
        if parent is not None and parent.log_lookahead is not None:  # potentials build on the ramped part alone
            parent = replace(parent, log_twist=parent.log_twist - parent.log_lookahead)
        if known.reward is not None and not self.rests(t, parent, weighed):
            ramp = self.adapt(t, known.reward, parent, log_lookahead)
            log_twist, carry = self.potential(self.scale(t, ramp), known.reward, parent)
        elif parent is None or (self.potential.memoryless and self.idle(t, parent)):
            log_twist, carry, ramp = known.log_twist, None, None if parent is None else parent.ramp
        else:
            log_twist, carry, ramp = parent.log_twist, parent.carry, parent.ramp
        return replace(known, log_twist=log_twist + log_lookahead, carry=carry, ramp=ramp, pending=None)

    # ---- the reward and its estimates

    def exact(self, x0: Tensor, of: Tensor | None = None) -> Tensor:
        """The reward of clean sequences (P, ...), in float64, (P,). Without their populations `of`, (P,), sequences are
        all particles in order."""
        of = self.located(x0) if of is None else of
        if torch.is_grad_enabled():  # the caller that differentiates limits the rows
            found = self._rewards(x0, of)
        else:
            row_bytes = 64 * x0[0].numel() if len(x0) else 1
            found = torch.cat(
                self.chunks.stretches(
                    lambda rows: self._rewards(x0[rows], None if of is None else of[rows]),
                    len(x0),
                    row_bytes,
                    x0.device,
                )
            )
        self.meter.count(len(x0))  # after the call: a chunk that runs out of memory is tried again
        return found

    def _rewards(self, x0: Tensor, of: Tensor | None) -> Tensor:
        context = context_rows(self.conditions, of, len(x0))
        return self.checked(unwritten("the reward", lambda x: self.reward(x, *context), x0), len(x0), x0.device)

    def checked(self, r: Tensor, rows: int, device: torch.device) -> Tensor:
        """What the reward returned for so many sequences on a device, as a float64 copy: one number for each."""
        if not isinstance(r, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"the reward must return a tensor of shape ({rows},), got {type(r).__name__}")
        if r.device != device:
            raise ValueError(
                f"the reward answers on {r.device} and the sequences are on {device}: let it return r.to(x.device)"
            )
        return _one_for_each(rows, r, "the reward", ": sum or squeeze what is left")

    def estimate(self, state: NoisyState, generator: Generator | None) -> Tensor:
        """r_hat(x_t), (P,), never -inf."""
        return self.floored(_one_for_each(len(state.x), self.estimator(self, state, generator), "the estimate"))

    def averaged(self, r: Tensor, log_v: Tensor) -> Tensor:
        """The average (P,) of rewards r (K, P) with log-weights log_v (K, P)."""
        found = self.average(r, log_v, self.kl)
        if not isinstance(found, Tensor) or found.shape != r.shape[1:]:  # pyright: ignore[reportUnnecessaryIsInstance]
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__  # pyright: ignore
            rows = r.shape[1]
            raise ValueError(f"Tilt.average must give one number for each of {rows} sequences, ({rows},), got {got}")
        return found

    def smoothed(self, estimates: Tensor, before: Tensor | None) -> Tensor:
        """Estimates (n,) averaged with those of the same particles in the step before, if any."""
        return estimates if before is None or not self.smoothing else torch.lerp(estimates, before, self.smoothing)

    def lookahead(self, state: NoisyState) -> Tensor:
        """The term of the log-twist that the ramp does not scale, (P,)."""
        assert self.log_lookahead is not None
        return _one_for_each(len(state.x), self.log_lookahead(self, state), "Tilt.log_lookahead")

    def floored(self, r: Tensor) -> Tensor:
        """Estimates with -inf replaced by the floor."""
        return replace_neg_inf(r, self.floor * self.kl)


def _one_for_each(rows: int, values: Tensor, name: str, mend: str = "") -> Tensor:
    """Values (P,) as a float64 copy: the function may return memory of its own, and r/kl needs the precision."""
    if values.shape != (rows,):
        raise ValueError(
            f"{name} must give one number for each of {rows} sequences, shape ({rows},), got "
            f"{tuple(values.shape)}{mend}"
        )
    return values.to(torch.float64, copy=True)
