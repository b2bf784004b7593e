"""Conditional SMC and particle Gibbs (Andrieu et al., 2010; docs/references.md).

Each sweep pins one particle of each population to a reference trajectory, runs the others as in SMC, and draws a new
trajectory by weight. This leaves the target on trajectories invariant for any number of particles, so the bias of a
single self-normalised run vanishes as sweeps are repeated. Random twists of the reference are redrawn: given the
trajectory their distribution under the target is the original one (the weights telescope), so redrawing them is a Gibbs
step of its own. Resampling must be iid multinomial: in systematic resampling the parents of the other children depend
on the place of the pinned particle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from tokensteer.core.numerics.domains import check_flag, check_flags, check_whole
from tokensteer.core.numerics.draws import inverse_cdf, uniforms
from tokensteer.core.particles.loop import summarise, sweep
from tokensteer.core.particles.path import Evaluation, Moved, Proposing, Record, Step, Wrapper
from tokensteer.core.particles.resampling import Resampler, multinomial, weights
from tokensteer.core.particles.result import Result, with_rows
from tokensteer.core.particles.triggers import Trigger, always


def pick(records: Sequence[Record], generator: Generator | None) -> Tensor:
    """Draw a trajectory for each population by final weight and follow its ancestors to the start, (T + 1, B, L)."""
    last = records[-1]
    if (last.log_w.amax(-1) == -math.inf).any():
        raise ValueError("a population has died, and no trajectory can be picked from it: use more particles")
    here = torch.arange(len(last.log_w), device=last.x.device)
    index = inverse_cdf(weights(last.log_w), uniforms((len(here), 1), last.log_w, generator)).squeeze(-1)
    x: list[Tensor] = []
    for record in reversed(records):
        x.append(record.x[here, index])
        index = record.ancestors[here, index]
    return torch.stack(x[::-1])


@dataclass
class Pinned(Wrapper[Proposing]):
    """A Feynman-Kac path whose first particle of each population follows `reference` (T + 1, B, L).

    With `ancestor_sampling` (Lindsten et al., 2014) each resampling draws the parent of the pinned particle among all
    particles, by weight times p(x'_s | x_t) / exp(psi_t(x_t)), where x'_s is the next state of the reference.
    """

    path: Proposing
    reference: Tensor
    ancestor_sampling: bool = False
    _latest: tuple[Tensor, Evaluation, int] | None = field(default=None, init=False, repr=False)
    _uncovered: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_flags(self)

    def _rows(self, rows: int) -> Tensor:
        """Indices of the pinned particles, (B,)."""
        populations = self.reference.shape[1]
        return torch.arange(populations, device=self.reference.device) * (rows // populations)

    def start(self, rows: int, generator: Generator | None) -> Tensor:
        return self.path.start(rows, generator).index_copy(0, self._rows(rows), self.reference[0])

    def evaluate(
        self, x: Tensor, t: float, generator: Generator | None, parent: Evaluation | None = None, weighed: bool = True
    ) -> Evaluation:
        evaluation = self.path.evaluate(x, t, generator, parent, weighed)
        self._latest = x, evaluation, [self.steps[0].t, *(step.s for step in self.steps)].index(t)
        if t == 0:
            self._check_covered(evaluation.log_twist[self._rows(len(x))])
        return evaluation

    def move(self, x: Tensor, evaluation: Evaluation, step: Step, generator: Generator | None) -> Moved:
        q = self.path.propose(x, evaluation, step)
        pinned = self._rows(len(x))
        y = q.sample(generator).index_copy(0, pinned, self.reference[step.index + 1])
        log_p, log_q = self.path.log_p(y, x, evaluation, step, q), q.log_prob(y)
        # A reference may have no mass under the target, as a given sequence that breaks a constraint. p or q has then
        # none along it, and its weight is 0.
        without = (log_p == -math.inf) | (log_q == -math.inf)
        lost = ((log_q == -math.inf) & (log_p > -math.inf))[pinned]
        self._uncovered = lost if self._uncovered is None else self._uncovered | lost
        return Moved(y, torch.where(without, -math.inf, log_p - log_q), self.path.parent_of(evaluation))

    def _check_covered(self, log_twist: Tensor) -> None:
        """Raise if the target has mass at a reference that q could not have drawn; log_twist (B,) is at its end."""
        if self._uncovered is not None and bool((self._uncovered & (log_twist > -math.inf)).any()):
            raise FloatingPointError(
                "the proposal has no mass at a trajectory that the target can take, so chains would not keep their "
                "target: give its network full support, or Constrained a `defence` above 0"
            )

    def resample(self, log_w: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor]:
        """Iid multinomial for all but the pinned particle, whose parent is itself or, with ancestor sampling, drawn."""
        ancestors, after = multinomial(log_w, generator)
        pinned = torch.zeros_like(ancestors[:, :1])
        if self.ancestor_sampling:
            pinned = inverse_cdf(weights(log_w + self._future(log_w)), uniforms((len(log_w), 1), log_w, generator))
        return torch.cat([pinned, ancestors[:, 1:]], 1), after

    def _future(self, log_w: Tensor) -> Tensor:
        """log p(x'_s | x_t) - psi_t(x_t), with x'_s the reference of the particle's population, (B, N)."""
        assert self._latest is not None, "particles are evaluated before they are resampled"
        x, evaluation, time = self._latest
        step = self.steps[time]
        y = self.reference[time + 1].repeat_interleave(log_w.shape[1], 0)
        log_p = self.path.log_p(y, x, evaluation, step, self.path.propose(x, evaluation, step))
        return (log_p - evaluation.log_twist).double().view_as(log_w)


def check_pinnable(path: Proposing, generator: Generator | None) -> None:
    """Try a first step, one row for each template, so that a path that cannot be pinned raises before the run."""
    trial = None if generator is None else torch.Generator(generator.device).manual_seed(0)
    x = path.start(path.resources.templates, trial)
    evaluation = path.evaluate(x, path.steps[0].t, trial)
    if evaluation.memory is not None:
        raise ValueError(
            "particle Gibbs cannot pin a kernel with a memory: its state (noise, a clock, carried confidence) would "
            "have to be drawn given the trajectory. Use MaskGIT without temperature, FirstHitting or "
            "ConfidenceRemask(carried=False) instead, or smc with more particles"
        )
    try:
        path.propose(x, evaluation, path.steps[0]).log_prob(x)
    except ValueError as error:
        raise ValueError(f"particle Gibbs weighs moves of a trajectory that it did not draw: {error}") from error


@dataclass(frozen=True)
class Chain:
    """A particle Gibbs chain: `samples` (S + 1, B, L), one after each sweep, the first from the initial reference;
    and the `result` of the last sweep, with the network rows of all sweeps."""

    samples: Tensor
    result: Result


def particle_gibbs(
    path: Proposing,
    sweeps: int,
    num_particles: int,
    populations: int = 1,
    *,
    resample: Resampler = multinomial,
    when: Trigger = always,
    ancestor_sampling: bool = False,
    reference: Tensor | None = None,
    generator: Generator | None = None,
    keep_states: bool | int = False,
) -> Chain:
    """Run `sweeps` conditional sweeps, each around a trajectory drawn from the one before. `keep_states` is that of
    `smc`, for the last sweep.

    The first reference is `reference` (T + 1, B, L), such as `pick(list(sweep(...)), generator)`; None runs SMC once.
    """
    if resample is not multinomial:
        raise ValueError(
            "particle Gibbs needs iid multinomial resampling: a scheme that draws the children jointly would have to "
            "condition the others on the pinned one. Use resample=multinomial"
        )
    check_whole("particle_gibbs: sweeps", sweeps)
    check_whole("particle_gibbs: num_particles", num_particles, 2, "one of them is pinned")
    check_flag("particle_gibbs: ancestor_sampling", ancestor_sampling)
    check_pinnable(path, generator)
    before = path.resources.spent()
    records: Sequence[Record] = []
    if reference is None:
        records = list(sweep(path, num_particles, populations, resample=multinomial, when=when, generator=generator))
        reference = pick(records, generator)
    picked = [reference]
    for _ in range(sweeps):
        pinned = Pinned(path, picked[-1], ancestor_sampling)
        records = list(
            sweep(pinned, num_particles, populations, resample=pinned.resample, when=when, generator=generator)
        )
        picked.append(pick(records, generator))
    result = summarise(records, generator, path.resources.templates, keep_states=keep_states)
    result = with_rows(result, before, path.resources.spent())
    return Chain(torch.stack([x[-1] for x in picked]), result)
