"""Pilots: short runs of a setting that measure how much its log Z scatters and what it costs.

Each population of a setting gives an independent estimate Z_hat for a cost, in network rows or seconds. The mean of B
of them has the relative error std/sqrt(B), about the error of log Z. So the best setting has the least variance times
cost, whether the rest of a budget is spent on more populations or on larger ones.

How reliable the prediction is: 1/sqrt(B) is exact, but std comes from a few dozen populations. With enough particles
log Z_hat is about normal, and std follows from the scatter of log Z_hat. With a scatter above about 1, weights have
tails that a pilot does not see: the predicted error is then too small, and settings are compared by the lognormal
variance, which favours more particles.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor

from tokensteer.core.numerics.domains import check_whole
from tokensteer.core.particles.resampling import log_mean_weight
from tokensteer.core.particles.result import Result
from tokensteer.core.proposals.proposal import Proposal
from tokensteer.core.steering.methods import Method
from tokensteer.core.steering.sizing import SHOWN, predicted_seconds
from tokensteer.core.twists.tilt import Tilt

FEWEST = 8  # populations of a pilot
PROBED = 2  # particles that tell what a pilot would cost
FINALISTS = 3  # settings that are run a second time
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Budget:
    """An amount of network rows, or of seconds."""

    amount: float
    unit: str

    @classmethod
    def of(cls, given: int | str) -> Budget:
        """Rows from a whole number, seconds from a string such as "30s", "2min" or "1h"."""
        if not isinstance(given, str) or given.isdecimal():
            rows = int(given) if isinstance(given, str) else given
            check_whole("a budget", rows, hint='rows as a number, or a time such as "30s"')
            return cls(rows, "rows")
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(s|min|h)\s*", given.lower())
        if match is None or float(match[1]) == 0:
            raise ValueError(f"a budget must be a time such as '30s' or '2min', or a number of rows, got {given!r}")
        return cls(float(match[1]) * SECONDS[match[2]], "s")

    def written(self, amount: float) -> str:
        return f"{amount:,.0f} rows" if self.unit == "rows" else f"{amount:.3g} s"


@dataclass(frozen=True)
class Setting:
    """A method to pilot, with the names of what it is made of by dimension: proposal, trigger, draws, ramp."""

    num_particles: int
    method: Method
    names: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def tilt(self) -> Tilt:
        tilt = self.method.steering.twist
        assert tilt is not None, "only a tilt has draws and a ramp"
        return tilt

    def steered(self, twist: Tilt | None = None, proposal: Proposal | None = None) -> Setting:
        """The setting with another tilt or proposal."""
        own = self.method.steering
        steering = replace(own, twist=twist or own.twist, proposal=proposal or own.proposal)
        return replace(self, method=replace(self.method, steering=steering))

    @property
    def least(self) -> int:
        """The fewest populations of a pilot."""
        return max(FEWEST, 2 * self.method.steering.resources.templates)

    def run(self, populations: int, budget: Budget, generator: Generator | None) -> Pilot:
        """Run at least so many populations, equally many of each template."""
        templates = self.method.steering.resources.templates
        populations = templates * math.ceil(populations / templates)
        began = time.perf_counter()
        result = self.method(self.num_particles, populations, generator=generator)
        log_z = result.log_z.view(templates, -1).cpu()  # waits for the device
        cost = sum(result.rows.values()) if budget.unit == "rows" else time.perf_counter() - began
        share = result.ess.mean(-1) / self.num_particles
        return Pilot(self, log_z, float(share[-1]), float(share.min()), cost / populations, cost, _iid_spread(result))


@dataclass(frozen=True)
class Pilot:
    """A run of independent populations: log Z_hat of each by template (C, B/C), mean ESS/N at the end and at worst, the
    cost of `each` population, and all that was `spent`. If no population resampled, particles are independent, and
    `iid_spread` is the spread by their weights: populations of a few particles, most without weight, do not show it."""

    setting: Setting
    log_z: Tensor
    ess: float
    worst_ess: float
    each: float
    spent: float
    iid_spread: float | None = None

    @property
    def populations(self) -> int:
        return self.log_z.numel()

    @property
    def scatter(self) -> float:
        """The standard deviation of log Z_hat within templates; infinite if some populations died."""
        if self.log_z.shape[-1] < 2:
            return math.inf
        scatter = float(self.log_z.var(-1).mean().sqrt())
        return scatter if math.isfinite(scatter) else math.inf

    @property
    def spread(self) -> float:
        """The standard deviation of Z_hat over its mean: the empirical one or, if larger, that of a lognormal with the
        scatter (at most 1) of the logs; infinite if all populations of a template died."""
        if self.iid_spread is not None:
            return self.iid_spread
        if self.log_z.shape[-1] < 2:
            return math.inf
        ratio = (self.log_z - log_mean_weight(self.log_z).unsqueeze(-1)).exp()
        own = float(ratio.var(-1).mean().sqrt())
        return max(own, math.sqrt(math.expm1(min(self.scatter, 1.0) ** 2))) if math.isfinite(own) else math.inf

    @property
    def price(self) -> float:
        """log(variance · cost), least for the best setting; the lognormal variance if the logs scatter beyond 1."""
        wide = 1.0 < self.scatter < math.inf and self.iid_spread is None
        log_variance = self.scatter**2 if wide else 2 * math.log(max(self.spread, 1e-300))
        return log_variance + math.log(self.each)

    def error(self, cost: float) -> float:
        """The predicted error of the log Z of a template after so much."""
        return self.spread * math.sqrt(len(self.log_z) * self.each / cost)

    def joined(self, more: Pilot) -> Pilot:
        """Two runs of a setting as one. The second, larger one tells the cost."""
        share = more.populations / (self.populations + more.populations)
        ess = self.ess + share * (more.ess - self.ess)
        worst = self.worst_ess + share * (more.worst_ess - self.worst_ess)
        log_z = torch.cat([self.log_z, more.log_z], -1)
        iid = None
        if self.iid_spread is not None and more.iid_spread is not None:
            iid = math.sqrt((1 - share) * self.iid_spread**2 + share * more.iid_spread**2)
        return Pilot(self.setting, log_z, ess, worst, more.each, self.spent + more.spent, iid)


def _iid_spread(result: Result) -> float | None:
    """The standard deviation of Z_hat over its mean, from the weights of independent particles."""
    here = torch.arange(result.log_w.shape[1], device=result.log_w.device)
    if not bool((result.ancestors == here).all()):
        return None
    log_w = result.log_w.view(result.templates, -1)
    ratio = (log_w - log_mean_weight(log_w).unsqueeze(-1)).exp()
    spread = float((ratio.var(-1).mean() / len(here)).sqrt())
    return spread if math.isfinite(spread) else math.inf


Change = Callable[[Setting], Setting]


@dataclass
class Search:
    """Varies one dimension after the other, each from the best setting so far. Begins no pilot that costs more than
    `left` if it costs as much as the best; those are counted as `too_dear`."""

    budget: Budget
    left: float
    generator: Generator | None
    spent: float = 0.0
    too_dear: int = 0
    pilots: list[Pilot] = field(default_factory=list[Pilot])
    compared: dict[str, list[Pilot]] = field(default_factory=dict[str, list[Pilot]])

    def run(self, start: Setting, options: Mapping[str, Mapping[str, Change]]) -> None:
        for dimension, named in options.items():
            start = _changed(start, dimension, *next(iter(named.items())))
        best = self._first(start, sum(len(named) - 1 for named in options.values()))
        if best is None:
            return
        populations = best.populations  # of all pilots: seconds of different numbers do not compare
        for dimension, named in options.items():
            found = [best]
            for name, change in list(named.items())[1:]:
                setting = _changed(best.setting, dimension, name, change)
                if populations * best.each * setting.num_particles / best.setting.num_particles > self.left:
                    self.too_dear += 1
                else:
                    found.append(self._spend(setting, populations))
            self.pilots += found[1:]
            self.compared[dimension] = found
            best = min(found, key=lambda pilot: pilot.price)

    def _first(self, setting: Setting, others: int) -> Pilot | None:
        """The pilot that the search begins with, as large as it can be if the others cost half as much again; None if
        what is left does not pay for the smallest one."""
        probe = self._probe(setting)
        times = setting.num_particles / probe.setting.num_particles
        at_most, whole = times * probe.each, probe.each * probe.populations  # of a population, and of the probe
        if setting.least * at_most > self.left:
            # That is if the cost is proportional to particles, which time need not be: find out by their first steps,
            # unless there is no time for two pilots however small.
            alone = at_most
            if self.budget.unit == "s" and max(2 * whole, SHOWN * at_most * probe.populations) <= self.left:
                seconds = self._predicted(setting, probe.populations)
                alone = seconds / probe.populations
                at_most = max(0.0, alone - probe.each) * times / max(times - 1, 1)
            if probe.populations * alone + (setting.least - probe.populations) * at_most > self.left:
                self.pilots.append(replace(probe, setting=setting, each=alone))
                return None
        pilot = self._spend(setting, setting.least)
        more = int((self.left - 1.5 * pilot.spent * others) / (1 + 1.5 * others) / pilot.each)
        if more > pilot.populations:
            pilot = pilot.joined(self._spend(setting, more))
        self.pilots.append(pilot)
        return pilot

    def _probe(self, setting: Setting) -> Pilot:
        """A few particles of a setting, which tell what a pilot would cost: seconds by their first steps."""
        steering = setting.method.steering
        few, populations = replace(setting, num_particles=PROBED), steering.resources.templates
        if self.budget.unit == "s":
            cost = self._predicted(few, populations)
            unknown = torch.full((populations, 1), math.nan)
            probe = Pilot(few, unknown, math.nan, math.nan, cost / populations, self.spent)
        else:
            probe = self._spend(few, populations)
            cost = probe.spent
        if cost > self.budget.amount / 2:
            written = self.budget.written
            raise ValueError(
                f"a budget of {written(self.budget.amount)} is too small for a pilot: a run of {PROBED} "
                f"particles takes {written(cost)}. Give at least "
                f"{written(math.ceil(2.5 * cost))}, or use fewer steps or draws"
            )
        return probe

    def _spend(self, setting: Setting, populations: int) -> Pilot:
        pilot = setting.run(populations, self.budget, self.generator)
        self.spent += pilot.spent
        self.left -= pilot.spent
        return pilot

    def _predicted(self, setting: Setting, populations: int) -> float:
        """The seconds of a run."""
        predicted, spent = predicted_seconds(setting.method, setting.num_particles, populations, self.generator)
        self.spent += spent
        self.left -= spent
        return predicted

    def best(self, amount: float) -> Pilot:
        """The best setting by all its runs, with the figures of its second run. The finalists are run again, as many as
        the amount pays for: the least of many noisy numbers is biased low."""
        if not self.compared:
            return self.pilots[0]
        finalists = sorted(self.pilots, key=lambda pilot: pilot.price)[:FINALISTS]
        while finalists and sum(pilot.setting.least * pilot.each for pilot in finalists) > amount:
            finalists.pop()
        if not finalists:
            return min(self.pilots, key=lambda pilot: pilot.price)
        populations = int(amount / sum(pilot.each for pilot in finalists))
        second = [self._spend(pilot.setting, populations) for pilot in finalists]
        both = {id(first): first.joined(again) for first, again in zip(finalists, second, strict=True)}
        for known in (self.pilots, *self.compared.values()):
            known[:] = [both.get(id(pilot), pilot) for pilot in known]
        return min(zip(both.values(), second, strict=True), key=lambda pair: pair[0].price)[1]


def _changed(setting: Setting, dimension: str, name: str, change: Change) -> Setting:
    return replace(change(setting), names={**setting.names, dimension: name})
