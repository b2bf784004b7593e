"""Conditional SMC and particle Gibbs: refine a finished run by running it again around one of its own trajectories.

One particle of each population is pinned to a reference trajectory, the others are drawn around it, and a new
trajectory is picked by weight. That leaves the target on trajectories unchanged for any number of particles, so sweep
after sweep washes out the bias of a single self-normalised run. Random twists are drawn anew for the reference too:
given the trajectory, the target leaves them their own law (the weights telescope), so that is a Gibbs step of its own,
and the chain moves faster than with the twists retained. Only iid multinomial resampling is right with a pinned
particle in this simple form: in a systematic comb the other children's parents depend on where the pinned one sits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from tokensteer.core.numerics.domains import check_whole
from tokensteer.core.numerics.draws import inverse_cdf, uniforms
from tokensteer.core.particles.loop import summarise, sweep
from tokensteer.core.particles.path import Evaluation, Moved, Proposing, Record, Resources, Step
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
class Pinned:
    """A path whose first particle of each population follows `reference` (T + 1, B, L); itself a Feynman-Kac path.

    With `ancestor_sampling` the pinned particle's past is redrawn too: at each resampling its parent is drawn among all
    particles by weight times p(x'_s | x_t) / exp(psi_t(x_t)), the chance that the reference goes on from there.
    """

    path: Proposing
    reference: Tensor
    ancestor_sampling: bool = False
    _latest: tuple[Tensor, Evaluation, int] | None = field(default=None, init=False, repr=False)

    @property
    def steps(self) -> Sequence[Step]:
        return self.path.steps

    @property
    def resources(self) -> Resources:
        return self.path.resources

    def _time(self, t: float) -> int:
        return [self.steps[0].t, *(step.s for step in self.steps)].index(t)

    def _rows(self, rows: int) -> Tensor:
        """The rows of the pinned particles among all."""
        populations = self.reference.shape[1]
        return torch.arange(populations, device=self.reference.device) * (rows // populations)

    def start(self, rows: int, generator: Generator | None) -> Tensor:
        return self.path.start(rows, generator).index_copy(0, self._rows(rows), self.reference[0])

    def evaluate(
        self,
        x: Tensor,
        t: float,
        generator: Generator | None,
        parent: Evaluation | None = None,
        weighed: bool = True,
    ) -> Evaluation:
        evaluation = self.path.evaluate(x, t, generator, parent, weighed)
        self._latest = x, evaluation, self._time(t)
        return evaluation

    def move(self, x: Tensor, evaluation: Evaluation, step: Step, generator: Generator | None) -> Moved:
        q = self.path.propose(x, evaluation, step)
        y = q.sample(generator).index_copy(0, self._rows(len(x)), self.reference[step.index + 1])
        log_ratio = self.path.log_p(y, x, evaluation, step, q) - q.log_prob(y)
        return Moved(y, log_ratio, self.path.parent_of(evaluation))

    def resample(self, log_w: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor]:
        """Iid multinomial for all but the pinned particle, which keeps its place or draws a new past."""
        ancestors, after = multinomial(log_w, generator)
        pinned = torch.zeros_like(ancestors[:, :1])
        if self.ancestor_sampling:
            pinned = inverse_cdf(weights(log_w + self._future(log_w)), uniforms((len(log_w), 1), log_w, generator))
        return torch.cat([pinned, ancestors[:, 1:]], 1), after

    def _future(self, log_w: Tensor) -> Tensor:
        """log p(x'_s | x_t) - psi_t(x_t) for every particle and the reference of its population, (B, N)."""
        assert self._latest is not None, "particles are evaluated before they are resampled"
        x, evaluation, time = self._latest
        step = self.steps[time]
        y = self.reference[time + 1].repeat_interleave(log_w.shape[1], 0)
        log_p = self.path.log_p(y, x, evaluation, step, self.path.propose(x, evaluation, step))
        return (log_p - evaluation.log_twist).double().view_as(log_w)


def _check_pinnable(path: Proposing, generator: Generator | None) -> None:
    """A first step of one row for each template, so that what cannot be pinned is said before anything is run."""
    trial = None if generator is None else torch.Generator(generator.device).manual_seed(0)
    x = path.start(path.resources.templates, trial)
    evaluation = path.evaluate(x, path.steps[0].t, trial)
    if evaluation.memory is not None:
        raise ValueError(
            "particle Gibbs cannot pin a kernel with a memory: what a particle remembers (noise, a clock, confidence "
            "carried along) would have to be drawn given the trajectory. Use MaskGIT without temperature, FirstHitting "
            "or ConfidenceRemask(carried=False) in their place, or smc with more particles"
        )
    try:
        path.propose(x, evaluation, path.steps[0]).log_prob(x)
    except ValueError as error:
        raise ValueError(f"particle Gibbs weighs moves of a trajectory that it did not draw: {error}") from error


@dataclass(frozen=True)
class Chain:
    """A particle Gibbs chain: `samples` (S + 1, B, L), the sequence picked after each sweep, the first from plain SMC;
    and the `result` of the last sweep, with the rows spent by all."""

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
) -> Chain:
    """`sweeps` conditional sweeps, each around a trajectory picked from the one before.

    The first is `reference` (T + 1, B, L), from any run by `pick(list(sweep(...)), generator)`; else SMC is run once.
    """
    if resample is not multinomial:
        raise ValueError(
            "particle Gibbs needs iid multinomial resampling: with a pinned particle, any scheme that draws the "
            "children together would have to condition the others on it. Use resample=multinomial"
        )
    check_whole("particle_gibbs: sweeps", sweeps)
    check_whole("particle_gibbs: num_particles", num_particles, 2, "one of them is pinned")
    _check_pinnable(path, generator)
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
    result = with_rows(summarise(records, generator, path.resources.templates), before, path.resources.spent())
    return Chain(torch.stack([x[-1] for x in picked]), result)
