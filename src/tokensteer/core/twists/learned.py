"""Learned twists: psi_t from a network, in place of an estimate or added to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Generator, Tensor

from tokensteer.core.twists.estimators import NoisyState
from tokensteer.core.twists.potentials import difference
from tokensteer.core.twists.ramps import constant as constant_ramp
from tokensteer.core.twists.tilt import Tilt


@dataclass(frozen=True)
class LearnedTwist:
    """The log-twist itself, as a network learned it: psi_t = value(x_t, t), whatever the ramp. Use it as
    `LearnedTwist(value).on(tilt)`. If it `ignores_time`, a particle that has not moved keeps its value.

    `LearnedTwist(value).beside(tilt)` is for a network that learned what the tilt's own twist lacks, ramp and draws as
    they are: it is added to that. A small network cannot know a reward to within a small kl; near the end the estimates
    do. It is asked wherever weights are looked at."""

    value: Callable[[Tensor, float], Tensor]
    ignores_time: bool = False
    random: bool = field(default=False, init=False, repr=False)

    def __call__(self, tilt: Tilt, look: NoisyState, generator: Generator | None) -> Tensor:
        tilt.meter.count(len(look.x))
        return tilt.kl * self.value(look.x, look.t).double()

    def on(self, tilt: Tilt) -> Tilt:
        """The same target, led to by what was learned."""
        return replace(tilt, estimator=self, ramp=constant_ramp, potential=difference)

    def beside(self, tilt: Tilt) -> Tilt:
        """The same target, led to by the tilt's own estimates with what was learned added to them."""
        if tilt.log_lookahead is not None:
            raise ValueError("LearnedTwist: this tilt looks ahead for a constraint already; use it as it is")

        def lacking(tilt: Tilt, look: NoisyState) -> Tensor:
            tilt.meter.count(len(look.x))
            return self.value(look.x, look.t)

        return replace(tilt, log_lookahead=lacking)
