"""Plan a budget of network rows: pilot a few settings with a share of it, and spend the rest on the best.

A setting is a number of particles and of draws, a ramp and a trigger. Each of its populations gives an independent
estimate Z_hat for a number of rows. The mean of B of them has the relative error std/sqrt(B), about the error of log Z.
So the best setting has the least variance times rows, and a plan runs it with as many populations as the rest of the
budget allows.

How reliable the prediction is: 1/sqrt(B) is exact, but std comes from a few dozen populations. With enough particles
log Z_hat is about normal, and std follows from the scatter of log Z_hat. With a scatter above about 1, weights have
tails that a pilot does not see: the predicted error is then too small, the plan reports it, and settings are compared
by the lognormal variance, which favours more particles. The least of many noisy numbers is biased low, so the best
three are run again and compared by the second runs alone. More particles than were piloted may be better still.
"""

from __future__ import annotations

import bisect
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Generator, Tensor

from tokensteer.core.numerics.domains import check_number, check_whole
from tokensteer.core.particles.loop import smc
from tokensteer.core.particles.resampling import Resampler, systematic
from tokensteer.core.particles.result import Result, pooled
from tokensteer.core.particles.triggers import Trigger, ess_below, every
from tokensteer.core.steering.methods import Method
from tokensteer.core.steering.steering import Steering
from tokensteer.core.twists.ramps import Adaptive, Ramp
from tokensteer.core.twists.ramps import constant as constant_ramp
from tokensteer.core.twists.ramps import linear as linear_ramp

FEWEST = 8  # populations of a pilot
FINALISTS = 3  # settings that are run a second time
STAGES = 5  # resampling steps of the default trigger `every`


@dataclass(frozen=True)
class Setting:
    """A method to pilot, with the names of its ramp and trigger; draws and ramp are None where they do not apply."""

    num_particles: int
    draws: int | None
    ramp: str | None
    trigger: str
    method: Method


@dataclass(frozen=True)
class Pilot:
    """A run of independent populations: log Z_hat of each (B,), mean ESS/N at the end and at worst, and all rows."""

    setting: Setting
    log_z: Tensor
    ess: float
    worst_ess: float
    rows: int

    @property
    def each(self) -> float:
        """Rows of a population."""
        return self.rows / len(self.log_z)

    @property
    def scatter(self) -> float:
        """The standard deviation of log Z_hat; infinite if some populations died."""
        scatter = float(self.log_z.std())
        return scatter if math.isfinite(scatter) else math.inf

    @property
    def spread(self) -> float:
        """The standard deviation of Z_hat over its mean: the empirical one or, if larger, that of a lognormal with the
        scatter (at most 1) of the logs; infinite if all populations died."""
        own = pooled(self.log_z)[1] * math.sqrt(len(self.log_z))
        return max(own, math.sqrt(math.expm1(min(self.scatter, 1.0) ** 2))) if math.isfinite(own) else math.inf

    @property
    def price(self) -> float:
        """log(variance · rows), least for the best setting; the lognormal variance if the logs scatter beyond 1."""
        wide = 1.0 < self.scatter < math.inf
        log_variance = self.scatter**2 if wide else 2 * math.log(max(self.spread, 1e-300))
        return log_variance + math.log(self.each)

    def error(self, rows: float) -> float:
        """The predicted error of log Z after so many rows."""
        return self.spread * math.sqrt(self.each / rows)


@dataclass(frozen=True)
class Plan:
    """The best of the `pilots` (in order, best first) and its predicted error: `run` it, or use its `method`.

    `winner` is the second run of the best setting; `spent`, the rows of all pilots, is part of `budget_rows`.
    """

    pilots: tuple[Pilot, ...]
    winner: Pilot
    populations: int
    budget_rows: int
    spent: int
    too_dear: int

    @property
    def method(self) -> Method:
        return self.winner.setting.method

    @property
    def num_particles(self) -> int:
        return self.winner.setting.num_particles

    @property
    def rows(self) -> float:
        """The predicted rows of `run`."""
        return self.populations * self.winner.each

    @property
    def error(self) -> float:
        """The predicted standard error of the pooled log Z."""
        return self.winner.error(self.rows)

    @property
    def ess(self) -> float:
        """The predicted ESS/N at the end."""
        return self.winner.ess

    @property
    def trusted(self) -> bool:
        """Whether the prediction is reliable: the log Z of populations scatter by no more than 1."""
        return self.winner.scatter <= 1.0

    def run(self, *, generator: Generator | None = None, progress: bool = False) -> Result:
        return self.method(self.num_particles, self.populations, generator=generator, progress=progress)

    def __str__(self) -> str:
        from rich.box import SIMPLE
        from rich.console import Console
        from rich.table import Table

        table = Table(box=SIMPLE)
        titles = ("N", "draws", "ramp", "trigger", "populations", "rows each", "ESS/N", "at worst", "scatter", "error")
        for title in titles:
            table.add_column(title, justify="left" if title in ("ramp", "trigger") else "right")
        for pilot in self.pilots:
            setting = pilot.setting
            best = "*" if setting is self.winner.setting else ""
            named = (f"{best}{setting.num_particles}", str(setting.draws or "–"), setting.ramp or "–", setting.trigger)
            counts = (str(len(pilot.log_z)), f"{pilot.each:,.0f}", f"{pilot.ess:.2f}", f"{pilot.worst_ess:.2f}")
            table.add_row(*named, *counts, f"{pilot.scatter:.2f}", f"{pilot.error(self.rows):.4f}")
        console = Console(file=io.StringIO(), width=120, color_system=None)
        console.print(table)
        assert isinstance(console.file, io.StringIO)
        lines = [
            f"Plan: {self.populations} × {self.num_particles} particles for {self.rows:,.0f} rows, after pilots of "
            f"{self.spent:,}",
            f"  log Z    ± {self.error:.4f} predicted, by the winner's second run",
            f"  ESS/N    {self.ess:.3f} at the end, {self.winner.worst_ess:.3f} at worst",
        ]
        if not self.trusted:
            lines += [
                f"  The log Z of single populations scatters by {self.winner.scatter:.1f}: expect a larger error.",
                "  Pilot more particles, more draws or a better proposal",
            ]
        if self.too_dear:
            lines.append(f"  {self.too_dear} more settings were too dear for a pilot")
        lines.append("Pilots, best first: how log Z scatters, and its error if all was spent on them; * is taken")
        return "\n".join([*lines, *(line.rstrip() for line in console.file.getvalue().splitlines() if line.strip())])


def plan(
    steering: Steering,
    budget_rows: int,
    *,
    particles: Sequence[int] = (16, 64),
    draws: Sequence[int] | None = None,
    ramps: Mapping[str, Ramp | Adaptive] | None = None,
    triggers: Mapping[str, Trigger] | None = None,
    resample: Resampler = systematic,
    share: float = 0.2,
    generator: Generator | None = None,
) -> Plan:
    """Pilot all combinations with a `share` of the budget, and plan the rest.

    Rows are those of all networks, as in `Result.rows`. By default `draws` are the tilt's and four times as many,
    `ramps` the tilt's and another, `triggers` ESS below a half, and five resamplings in a run. Rows are assumed
    proportional to populations; in toys, where many particles are equal, they grow more slowly.
    """
    if steering.resources.templates > 1:
        raise ValueError("plan one template at a time: give the model a template of shape (L,)")
    check_whole("plan: budget_rows", budget_rows)
    check_number("plan: share", share, "(0, 1)", "try 0.2")
    for name, counts in (("particles", particles), ("draws", draws or ())):
        for count in counts:
            check_whole(f"plan: {name}", count)
    settings = _settings(steering, sorted(particles), draws, ramps, triggers, resample)
    quota = budget_rows * share * 2 / 3 / len(settings)
    pilots: list[Pilot] = []
    rows_of: dict[object, float] = {}  # rows of a particle, by draws, ramp and trigger
    dear: list[float] = []
    spent = 0
    for setting in settings:
        kind, size = (setting.draws, setting.ramp, setting.trigger), setting.num_particles
        first = _pilot(setting, 2, generator) if kind not in rows_of else None
        if first is not None:
            spent += first.rows
            rows_of[kind] = first.each / size
        count = int(quota / (rows_of[kind] * size))
        if count < FEWEST:
            dear.append(rows_of[kind] * size)
            continue
        found = _pilot(setting, count - (0 if first is None else 2), generator)
        spent += found.rows
        pilots.append(found if first is None else _join(first, found))
    if not pilots:
        needed = math.ceil(1.05 * FEWEST * min(dear) * len(settings) * 1.5 / share)
        raise ValueError(
            f"a budget of {budget_rows:,} rows is too small to pilot {len(settings)} settings: {FEWEST} populations of "
            f"the cheapest take {FEWEST * min(dear):,.0f} rows. Give at least {needed:,} rows, or fewer or smaller "
            "particles, draws, ramps and triggers"
        )
    pilots.sort(key=lambda pilot: pilot.price)
    if pilots[0].spread == math.inf:
        raise ValueError("all populations of all pilots died: use more particles, or soften the constraint")
    best = pilots[:FINALISTS]
    quota = budget_rows * share / 3 / len(best)
    second = [_pilot(pilot.setting, max(FEWEST, int(quota / pilot.each)), generator) for pilot in best]
    winner = min(second, key=lambda pilot: pilot.price)
    spent += sum(pilot.rows for pilot in second)
    populations = max(1, int((budget_rows - spent) / winner.each))
    return Plan(tuple(pilots), winner, populations, budget_rows, spent, len(dear))


def _settings(
    steering: Steering,
    particles: Sequence[int],
    draws: Sequence[int] | None,
    ramps: Mapping[str, Ramp | Adaptive] | None,
    triggers: Mapping[str, Trigger] | None,
    resample: Resampler,
) -> list[Setting]:
    """All combinations, by number of particles."""
    tilt = steering.twist
    if triggers is None:
        rarely = max(1, len(steering.steps) // STAGES)
        triggers = {"ess below 0.5": ess_below(0.5), f"every {rarely}": every(rarely)}
    if not particles or not triggers:
        raise ValueError("plan: give at least one number of particles and one trigger")
    paths: list[tuple[int | None, str | None, Steering]] = [(None, None, steering)]
    if tilt is not None:
        if ramps is None:
            other = ("linear", linear_ramp) if tilt.ramp is constant_ramp else ("constant", constant_ramp)
            ramps = dict([("the tilt's", tilt.ramp), other])
        numbers = (draws or (tilt.draws, 4 * tilt.draws)) if tilt.drawn else (tilt.draws,)
        paths = [
            (m if tilt.drawn else None, name, replace(steering, twist=replace(tilt.with_draws(m), ramp=ramp)))
            for m, (name, ramp) in product(numbers, ramps.items())
        ]
    settings = [
        Setting(n, m, ramp, trigger, Method(path, resample, when))
        for (m, ramp, path), n, (trigger, when) in product(paths, particles, triggers.items())
    ]
    return sorted(settings, key=lambda setting: setting.num_particles)


def _pilot(setting: Setting, populations: int, generator: Generator | None) -> Pilot:
    result = setting.method(setting.num_particles, populations, generator=generator)
    share = result.ess.mean(-1) / setting.num_particles
    return Pilot(setting, result.log_z, float(share[-1]), float(share.min()), sum(result.rows.values()))


def _join(a: Pilot, b: Pilot) -> Pilot:
    """Two runs of a setting as one."""
    more = len(b.log_z) / (len(a.log_z) + len(b.log_z))
    ess, worst = a.ess + more * (b.ess - a.ess), a.worst_ess + more * (b.worst_ess - a.worst_ess)
    return Pilot(a.setting, torch.cat([a.log_z, b.log_z]), ess, worst, a.rows + b.rows)


def adapted_ramp(
    steering: Steering,
    num_particles: int,
    populations: int = 1,
    *,
    share: float = 0.9,
    generator: Generator | None = None,
) -> Ramp:
    """A fixed ramp from one adaptive pilot run: the median over populations at each time, linear in between."""
    if steering.twist is None:
        raise ValueError("adapted_ramp: the steering has no Tilt, and so no reward to let in: give it one")
    pilot = replace(steering, twist=replace(steering.twist, ramp=Adaptive(share)))
    chosen = smc(pilot, num_particles, populations, generator=generator).ramp
    assert chosen is not None, "an adaptive ramp is recorded"
    times = [0.0, *(step.t for step in reversed(steering.steps))]
    values = [float(value) for value in chosen.median(-1).values.flip(0)]

    def ramp(t: float) -> float:
        after = min(max(bisect.bisect_left(times, t), 1), len(times) - 1)
        low, high = times[after - 1], times[after]
        return values[after - 1] + (values[after] - values[after - 1]) * (t - low) / (high - low)

    return ramp
