"""Learned twists: psi_t from a network, in place of an estimate or added to it (Heng et al., 2020; Zhao et al., 2024;
docs/references.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Generator, Tensor

from tokensteer.core.numerics.domains import check_callable, check_flags
from tokensteer.core.twists.estimators import NoisyState
from tokensteer.core.twists.potentials import difference
from tokensteer.core.twists.ramps import constant as constant_ramp
from tokensteer.core.twists.tilt import Tilt


@dataclass(frozen=True)
class LearnedTwist:
    """psi_t = value(x_t, t), without a ramp, as `LearnedTwist(value).on(tilt)`; or added to the twist of the tilt, as
    `LearnedTwist(value).beside(tilt)`. If it `ignores_time`, a particle that has not moved keeps its value.

    `beside` is for a network that learned the difference between the best twist and the tilt's: a small network does
    not approximate r/kl well for a small kl, while estimates do near the end."""

    value: Callable[[Tensor, float], Tensor]
    ignores_time: bool = False
    random: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        check_callable("LearnedTwist.value", self.value, "x and t, a network that returns (P,)")
        check_flags(self)

    def __call__(self, tilt: Tilt, state: NoisyState, generator: Generator | None) -> Tensor:
        return tilt.kl * self._lookahead(tilt, state).double()

    def _lookahead(self, tilt: Tilt, state: NoisyState) -> Tensor:
        tilt.meter.count(len(state.x))
        return self.value(state.x, state.t)

    def on(self, tilt: Tilt) -> Tilt:
        """The same target, with this twist alone."""
        return replace(tilt, estimator=self, ramp=constant_ramp, potential=difference, smoothing=0.0)

    def beside(self, tilt: Tilt) -> Tilt:
        """The same target, with this twist added to that of the tilt, wherever weights are read."""
        if tilt.log_lookahead is not None:
            raise ValueError("LearnedTwist: this tilt has a log_lookahead already; use it as it is")
        return replace(tilt, log_lookahead=self._lookahead)
