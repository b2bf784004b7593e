"""Twists: how much reward a half-finished sequence is worth.

The target is p(x_0) · exp(r(x_0)/kl). On the way there the particles follow p(x_t) · exp(psi_t(x_t)) with the log-twist
psi_t = ramp(t)/kl · r_hat(x_t); any finite psi_t is right as long as psi_0 = r/kl exactly, so r_hat may be an estimate
(`core.twists.estimators`) and may be random: it is drawn once and travels with its particle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Generator, Tensor

from tokensteer.core.numerics.batching import Chunks, Meter
from tokensteer.core.numerics.domains import check_number, check_whole
from tokensteer.core.numerics.draws import replace_neg_inf
from tokensteer.core.particles.path import Evaluation
from tokensteer.core.twists.estimators import Average, NoisyState, Relaxed, Sampled, SoftInput, log_mean_exp
from tokensteer.core.twists.potentials import Potential, difference, maximum, total
from tokensteer.core.twists.ramps import Adaptive, Ramp
from tokensteer.core.twists.ramps import linear as linear_ramp

Reward = Callable[[Tensor], Tensor]


LogLookahead = Callable[["Tilt", NoisyState], Tensor]


class Estimator(Protocol):
    """r_hat(x_t), (P,), for a tilt. `random` estimates need a generator. One that is `Timeless` depends on x_t and the
    prediction alone: a particle that has not moved then keeps it, noise and all."""

    @property
    def random(self) -> bool: ...
    def __call__(self, tilt: Tilt, look: NoisyState, generator: Generator | None) -> Tensor: ...


@dataclass(frozen=True)
class Tilt:
    """The target p(x_0) · exp(reward(x_0)/kl), and the estimates that lead there.

    `reward` takes clean ids (P, L) and gives (P,); if `differentiable`, it also takes one-hots (P, L, V). -inf is a
    hard constraint. An estimate of -inf before the end only means that no draw met it, and the sequence may still
    recover: it counts as a log-twist of ramp(t) · `floor`, since a weight of zero would lose what is still possible.
    `ramp` is a function of t, or `Adaptive(share)`. `log_lookahead` is a finite term of the log-twist before the end
    that counts in full whatever the ramp, such as the log-probability that a constraint will be met.
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
    meter: Meter = field(default_factory=Meter, init=False, repr=False, compare=False)
    chunks: Chunks = field(default_factory=Chunks, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.reward):
            raise TypeError(f"Tilt.reward must be a function of clean sequences (P, L), got {self.reward!r}")
        if not isinstance(self.ramp, Adaptive):
            self._check(self.ramp)
        check_number("Tilt.kl", self.kl, "(0, inf)", "it divides the reward")
        check_whole("Tilt.draws", self.draws)
        check_number("Tilt.floor", self.floor, hint="a log-twist of -inf would lose what can still recover")
        if isinstance(self.estimator, SoftInput | Relaxed) and not self.differentiable:
            raise ValueError(
                f"{type(self.estimator).__name__} gives the reward one-hots that are no sequence: set "
                "differentiable=True if it can take them, or use Sampled()"
            )

    def with_draws(self, draws: int) -> Tilt:
        """The same tilt with another number of draws, its rows counted and cut with those of this one."""
        inner = getattr(self.estimator, "with_draws", None)  # where the estimate is another tilt's
        other = replace(self, draws=draws, estimator=self.estimator if inner is None else inner(draws))
        object.__setattr__(other, "meter", self.meter)
        object.__setattr__(other, "chunks", self.chunks)
        return other

    def _check(self, ramp: Ramp) -> None:
        if not callable(ramp):
            raise ValueError(f"Tilt.ramp must be a function of t, got {ramp!r}; try ramps.linear")
        if not abs(ramp(0.0) - 1.0) <= 1e-9:
            raise ValueError(f"Tilt.ramp(0) must be 1, got {ramp(0.0):.6g}: the final target would not be exp(r/kl)")

    @property
    def drawn(self) -> bool:
        """Whether the reward on the way is estimated from draws, be their noise fresh or shared."""
        return getattr(self.estimator, "drawn", False)

    def scale(self, t: float, chosen: Tensor | None = None) -> float | Tensor:
        """ramp(t)/kl, exactly 1/kl at the end; for a ramp that adapts, of the lambdas `chosen`, 0 if none were yet."""
        if t == 0:
            return 1.0 / self.kl
        if isinstance(self.ramp, Adaptive):
            return 0.0 if chosen is None else chosen / self.kl
        return self.ramp(t) / self.kl

    def aim(self, t: float, evaluation: Evaluation) -> Tensor:
        """The scale that a proposal expects at time t, (P,); for a ramp that adapts, the last that is known."""
        like, scale = evaluation.log_twist, self.scale(t, evaluation.ramp)
        return scale.to(like).expand_as(like) if isinstance(scale, Tensor) else torch.full_like(like, scale)

    def adapt(
        self, t: float, r: Tensor, parent: Evaluation | None, log_lookahead: Tensor | float = 0.0
    ) -> Tensor | None:
        """The lambda of each particle with estimate r and log-chance, (P,): 0 at the start, 1 at the end. None for a
        ramp of t."""
        if not isinstance(self.ramp, Adaptive):
            return None
        nothing = torch.zeros_like(r)
        if t == 0:
            return nothing + 1.0
        before = nothing if parent is None or parent.ramp is None else parent.ramp
        if parent is None or parent.pending is None:
            return before  # there is no population to adapt to
        least = nothing if self.potential in (maximum, total) else before
        chosen = self.ramp.choose(
            parent.pending, least, lambda ramp: self.potential(ramp / self.kl, r, parent)[0] + log_lookahead
        )
        return chosen

    def idle(self, t: float, parent: Evaluation | None = None) -> bool:
        """Whether no estimate is needed at time t: it counts for nothing there, and no potential of yours wants it."""
        nothing = parent is None if isinstance(self.ramp, Adaptive) else t != 0 and self.ramp(t) == 0
        return nothing and self.potential in (difference, maximum, total)

    def rests(self, t: float, parent: Evaluation | None, weighed: bool) -> bool:
        """Whether no estimate is made at time t: it is idle, or nobody will look at the weights there. A potential with
        a memory wants every estimate all the same."""
        lazy = not weighed and parent is not None and self.potential is difference
        return lazy or self.idle(t, parent)

    def rest(self, nothing: Tensor, t: float, parent: Evaluation | None) -> tuple[Tensor, Tensor | None]:
        """The log-twist and carry where no estimate was made: nothing if it counts for nothing, else the parent's."""
        if parent is None or (self.potential is difference and self.idle(t, parent)):
            return nothing, None
        return parent.log_twist, parent.carry

    def exact(self, x0: Tensor) -> Tensor:
        """The reward of clean sequences (P, ...), checked for shape, in float64, (P,)."""
        if torch.is_grad_enabled():  # whoever differentiates sees to the size of the whole
            found = self._rewards(x0)
        else:
            found = torch.cat(self.chunks.run(self._rewards, x0, 64 * x0[0].numel() if len(x0) else 1))
        self.meter.count(len(x0))  # once it is there: what ran out of memory is tried again
        return found

    def _rewards(self, x0: Tensor) -> Tensor:
        return self.checked(self.reward(x0), len(x0), x0.device)

    def checked(self, r: Tensor, rows: int, device: torch.device) -> Tensor:
        """What the reward said of so many sequences on a device, if it is one number for each."""
        if not isinstance(r, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"the reward must return a tensor of shape ({rows},), got {type(r).__name__}")
        if r.shape != (rows,):
            raise ValueError(
                f"the reward must give one number for each of {rows} sequences, shape ({rows},), got "
                f"{tuple(r.shape)}: sum or squeeze what is left"
            )
        if r.device != device:
            raise ValueError(
                f"the reward answers on {r.device} and the sequences are on {device}: let it return r.to(x.device)"
            )
        # A copy, since a reward may answer in memory of its own; and r/kl is not for half precision.
        return r.to(torch.float64, copy=True)

    def estimate(self, look: NoisyState, generator: Generator | None) -> Tensor:
        """r_hat(x_t), (P,), never -inf."""
        r = self.estimator(self, look, generator)
        if r.shape != (len(look.x),):
            raise ValueError(
                f"the estimate must give one number for each of {len(look.x)} sequences, got shape {tuple(r.shape)}"
            )
        return self.floored(r.double())

    def lookahead(self, look: NoisyState) -> Tensor:
        """The term of the log-twist that counts in full, (P,)."""
        assert self.log_lookahead is not None
        found = self.log_lookahead(self, look)
        if found.shape != (len(look.x),):
            raise ValueError(
                f"Tilt.log_lookahead must give one number for each of {len(look.x)} sequences, got shape "
                f"{tuple(found.shape)}"
            )
        return found.to(torch.float64, copy=True)  # as for rewards

    def floored(self, r: Tensor) -> Tensor:
        """An estimate, never -inf."""
        return replace_neg_inf(r, self.floor * self.kl)
