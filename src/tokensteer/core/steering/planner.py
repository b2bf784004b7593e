"""Plan a budget of network rows or seconds: pilot a few settings with a share of it, and spend the rest on the best.

A setting is a trigger, a number of draws, a proposal with the smoothing that its estimates need, a ramp and a number of
particles. They are varied one after the other, each from the best so far. Pilots only choose: what is chosen is fixed
before the run, which is therefore exact.
"""

from __future__ import annotations

import bisect
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Generator

from tokensteer.core.models.product import Product
from tokensteer.core.numerics.domains import check_number, check_whole
from tokensteer.core.particles.loop import smc
from tokensteer.core.particles.resampling import Resampler, systematic
from tokensteer.core.particles.result import Result
from tokensteer.core.particles.triggers import Trigger, ess_below, every, never
from tokensteer.core.proposals.gradient import Gradient
from tokensteer.core.proposals.mixture import Mixture
from tokensteer.core.proposals.proposal import FromModel, Guided, Proposal
from tokensteer.core.steering.methods import CLIP, LOOKS, Method, usual_smoothing
from tokensteer.core.steering.pilots import Budget, Change, Pilot, Search, Setting
from tokensteer.core.steering.sizing import most_within, predicted_seconds
from tokensteer.core.steering.steering import Steering
from tokensteer.core.twists.ramps import Adaptive, Ramp
from tokensteer.core.twists.ramps import constant as constant_ramp
from tokensteer.core.twists.ramps import linear as linear_ramp

FIRST = 0.04  # of what is left, for the first of the runs that tell how much fits into a time
STAGES = 5  # resampling steps of the default trigger `every`
CLIPS = (CLIP, 3 * CLIP)  # of the gradients that are tried


@dataclass(frozen=True)
class Plan:
    """The best of the `pilots` (in order, best first) and its predicted error: `run` it, or use its `method`.

    `winner` is the best setting's second run, or its first if there is none. `spent` is the cost of all pilots, a part
    of the budget. `too_dear` settings were left out. `compared` has the pilots of each dimension that was varied; it is
    empty if the budget paid for no pilot, and the first setting was taken: then `error` is inf and, if the budget is a
    time, `ess` is nan.
    """

    pilots: tuple[Pilot, ...]
    winner: Pilot
    num_particles: int
    populations: int
    budget: Budget
    spent: float
    too_dear: int
    compared: Mapping[str, Sequence[Pilot]]

    @property
    def method(self) -> Method:
        return self.winner.setting.method

    @property
    def cost(self) -> float:
        """The predicted cost of `run`, in rows or seconds as the budget. Particles are chosen to fill the seconds."""
        if self.budget.unit == "s":
            return max(0.0, self.budget.amount - self.spent)
        return self.populations * self.winner.each * self.num_particles / self.winner.setting.num_particles

    @property
    def error(self) -> float:
        """The predicted standard error of the pooled log Z."""
        return self.winner.error(self.cost)

    @property
    def ess(self) -> float:
        """The predicted ESS/N at the end."""
        return self.winner.ess

    @property
    def trusted(self) -> bool:
        """Whether the prediction is reliable: the log Z of populations scatter by no more than 1."""
        return (self.winner.scatter if self.winner.iid_spread is None else self.winner.iid_spread) <= 1.0

    def run(self, *, generator: Generator | None = None, progress: bool = False) -> Result:
        return self.method(self.num_particles, self.populations, generator=generator, progress=progress)

    @property
    def smoothing(self) -> float:
        """The smoothing of the tilt that is taken."""
        tilt = self.method.steering.twist
        return 0.0 if tilt is None or tilt.smoothing is None else tilt.smoothing

    @property
    def reasons(self) -> dict[str, str]:
        """What was chosen in each dimension, and how many times the cost the others need for the same error."""
        found: dict[str, str] = {}
        for dimension, chosen in self.winner.setting.names.items():
            of: dict[str, Pilot] = {}
            for pilot in sorted(self.compared.get(dimension, ()), key=lambda pilot: pilot.price):
                of.setdefault(pilot.setting.names[dimension], pilot)
            best = of.get(chosen)
            others = [
                f"{name}: {_times(pilot.price - best.price)}"
                for name, pilot in of.items()
                if best is not None and name != chosen
            ]
            found[dimension] = f"{chosen} ({'; '.join(others)})" if others else chosen
            if dimension == "proposal" and self.smoothing:
                found["smoothing"] = f"{self.smoothing:g}, an average over recent steps against the noise of draws"
        return found

    def __str__(self) -> str:
        written = self.budget.written
        chosen = (f"  {dimension:<9} {reason}" for dimension, reason in self.reasons.items())
        lines = [
            f"Plan: {self.populations} × {self.num_particles} particles for {written(self.cost)}, after pilots of "
            f"{written(self.spent)}"
        ]
        if not self.compared:
            return "\n".join([*lines, "The budget is too small for pilots: these are the first of each list", *chosen])
        lines += [
            f"  log Z    ± {self.error:.4f} predicted, by the winner's second run",
            f"  ESS/N    {self.ess:.3f} at the end, {self.winner.worst_ess:.3f} at worst",
            "Chosen, and what the others cost for the same error:",
            *chosen,
        ]
        if not self.trusted:
            lines += [
                f"  The log Z of single populations scatters by {self.winner.scatter:.1f}: expect a larger error.",
                "  Pilot more particles, more draws or a better proposal",
            ]
        if self.too_dear:
            lines.append(f"  {self.too_dear} more settings were too dear for a pilot")
        lines.append("Pilots, best first: how log Z scatters, and its error if all was spent on them; * is taken")
        return "\n".join([*lines, *self._table()])

    def _table(self) -> list[str]:
        from rich.box import SIMPLE
        from rich.console import Console
        from rich.table import Table

        table, dimensions = Table(box=SIMPLE), tuple(self.winner.setting.names)
        for title in (*dimensions, "populations", f"{self.budget.unit} each", "ESS/N", "scatter", "error"):
            table.add_column(title, justify="left" if title in dimensions else "right")
        for pilot in self.pilots:
            best = "*" if pilot.setting is self.winner.setting else ""
            first, *names = pilot.setting.names.values()
            each = f"{pilot.each:,.0f}" if self.budget.unit == "rows" else f"{pilot.each:.3g}"
            figures = (str(pilot.populations), each, f"{pilot.ess:.2f}", f"{pilot.scatter:.2f}")
            table.add_row(best + first, *names, *figures, f"{pilot.error(self.cost):.4f}")
        file = io.StringIO()
        Console(file=file, width=120, color_system=None).print(table)
        return [line.rstrip() for line in file.getvalue().splitlines() if line.strip()]


def _times(more: float) -> str:
    return f"{math.exp(more):.2g} ×" if more < math.log(100) else "over 100 ×"


def plan(
    steering: Steering,
    budget: int | str,
    *,
    populations: int | None = None,
    particles: Sequence[int] = (16, 64),
    proposals: Mapping[str, Proposal] | None = None,
    clips: Sequence[float | None] = CLIPS,
    draws: Sequence[int] | None = None,
    ramps: Mapping[str, Ramp | Adaptive] | None = None,
    triggers: Mapping[str, Trigger] | None = None,
    resample: Resampler = systematic,
    share: float = 0.2,
    generator: Generator | None = None,
) -> Plan:
    """Pilot settings with a `share` of the budget, a number of rows or a time such as "30s", and plan the rest.

    The rest is spent on as many populations as it allows or, with `populations` given, on their particles; a model
    with several templates has equally many populations of each. Rows are those of all networks, as in `Result.rows`,
    and proportional to particles; how many fit into a time is measured by the first steps of runs that grow. A budget
    that is too small for pilots is spent on the first setting. The first entry of each list is where the search begins.
    By default `proposals` are the steering's, the model and, for a differentiable reward, gradients: with each of the
    `clips`, with the first of them every fourth step, and the steepest mixed with the model. `draws` are the tilt's,
    four times as many and a quarter; `ramps` the tilt's, linear and constant; `triggers` ESS below a half at ten times,
    never, five times in a run, and ESS below a half at every step. Proposals have the smoothing that `smc_grad` chooses
    for them, unless the tilt has one of its own.
    """
    amount = Budget.of(budget)
    check_number("plan: share", share, "(0, 1)", "try 0.2")
    if populations is not None:
        check_whole("plan: populations", populations)
    for name, counts in (("particles", particles), ("draws", draws or ())):
        for count in counts:
            check_whole(f"plan: {name}", count)
    proposals = usual_proposals(steering, clips) if proposals is None else proposals
    options = _options(steering, particles, proposals, draws, ramps, triggers)
    search = Search(amount, amount.amount * share * 2 / 3, generator)
    search.run(Setting(1, Method(steering, resample)), options)
    winner = search.best(amount.amount * share / 3)
    if winner.spread == math.inf and search.compared:
        raise ValueError("all populations of all pilots died: use more particles, or soften the constraint")
    pilots = tuple(sorted(search.pilots, key=lambda pilot: pilot.price))
    size, count, fitting = _sized(winner, amount, search.spent, populations, generator)
    return Plan(pilots, winner, size, count, amount, search.spent + fitting, search.too_dear, search.compared)


def _sized(
    winner: Pilot, budget: Budget, spent: float, populations: int | None, generator: Generator | None
) -> tuple[int, int, float]:
    """Particles and populations that what is left of the budget pays for, and the cost of finding out.

    Rows are proportional to particles. Seconds are measured, by the first steps of runs that grow: few particles may
    take as long as one.
    """
    templates, size = winner.setting.method.steering.resources.templates, winner.setting.num_particles
    left = max(0.0, budget.amount - spent)
    many = left / winner.each  # populations of the pilot's size
    proportional = int(many / templates) if populations is None else int(many * size / populations)
    fitting = 0.0
    first = max(1, int(FIRST * proportional))
    if budget.unit == "s":

        def seconds_of(count: int) -> tuple[float, float]:
            sizes = (size, templates * count) if populations is None else (count, populations)
            return predicted_seconds(winner.setting.method, *sizes, generator)

        proportional, fitting = most_within(seconds_of, left, first)
    if populations is None:
        return size, templates * max(1, proportional), fitting
    return max(1, proportional), populations, fitting


def _options(
    steering: Steering,
    particles: Sequence[int],
    proposals: Mapping[str, Proposal],
    draws: Sequence[int] | None,
    ramps: Mapping[str, Ramp | Adaptive] | None,
    triggers: Mapping[str, Trigger] | None,
) -> dict[str, dict[str, Change]]:
    """The named options of each dimension, in the order in which they are varied."""
    tilt = steering.twist
    if triggers is None:
        rarely = max(1, len(steering.steps) // STAGES)
        always = {"ess:0.5": ess_below(0.5)}
        few = {f"ess:0.5:{LOOKS}": ess_below(0.5, LOOKS)} if len(steering.steps) > LOOKS else always
        triggers = few | {"never": never, f"every:{rarely}": every(rarely)} | always
    options: dict[str, dict[str, Change]] = {"trigger": {name: _trigger(when) for name, when in triggers.items()}}
    if tilt is not None:
        named = {"linear": linear_ramp, "constant": constant_ramp}
        if ramps is None:
            ramps = {"the tilt's": tilt.ramp} | {name: ramp for name, ramp in named.items() if ramp is not tilt.ramp}
        options["ramp"] = {name: _ramp(ramp) for name, ramp in ramps.items()}
    options["proposal"] = {name: _proposal(proposal, steering) for name, proposal in proposals.items()}
    if tilt is not None and tilt.drawn:
        numbers = dict.fromkeys(draws or (tilt.draws, 4 * tilt.draws, max(1, tilt.draws // 4)))
        options["draws"] = {str(m): _draws(m) for m in numbers}
    options["particles"] = {str(n): _particles(n) for n in particles}
    for dimension, named in options.items():
        if not named:
            raise ValueError(f"plan: there is nothing to choose from in {dimension}: give at least one")
    return options


def usual_proposals(steering: Steering, clips: Sequence[float | None] = CLIPS) -> dict[str, Proposal]:
    """The steering's own, the model and, for a differentiable reward, gradients with each of the clips (None for none).
    The first is the steering's."""
    found: dict[str, Proposal] = {"the model": FromModel()}
    if isinstance(steering.model, Product):
        found["guided"] = Guided()
    if steering.twist is not None and steering.twist.differentiable and clips:
        gradients = [Gradient(clip=clip, tokens_only=True) for clip in clips]
        first, *others = gradients
        found |= {_named(first): first, f"{_named(first)}, every 4": replace(first, every=4)}
        found |= {_named(gradient): gradient for gradient in others}
        steepest = max(gradients, key=lambda gradient: math.inf if gradient.clip is None else gradient.clip)
        found["half gradient"] = Mixture((FromModel(), steepest))
    own = next((name for name, proposal in found.items() if proposal == steering.proposal), "the steering's")
    return {own: steering.proposal} | found


def _named(gradient: Gradient) -> str:
    if gradient.clip is None:
        return "gradient, no clip"
    return "gradient" if gradient.clip == CLIP else f"gradient, clip {gradient.clip:g}"


def _particles(count: int) -> Change:
    return lambda setting: replace(setting, num_particles=count)


def _trigger(when: Trigger) -> Change:
    return lambda setting: replace(setting, method=replace(setting.method, when=when))


def _proposal(proposal: Proposal, steering: Steering) -> Change:
    """A change to the proposal and, if the steering has a tilt, to the smoothing that it needs."""
    if steering.twist is None:
        return lambda setting: setting.steered(proposal=proposal)
    smoothing = usual_smoothing(steering.model, steering.twist, proposal)
    return lambda setting: setting.steered(twist=setting.tilt.with_smoothing(smoothing), proposal=proposal)


def _draws(count: int) -> Change:
    return lambda setting: setting.steered(twist=setting.tilt.with_draws(count))


def _ramp(ramp: Ramp | Adaptive) -> Change:
    return lambda setting: setting.steered(twist=setting.tilt.with_ramp(ramp))


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
