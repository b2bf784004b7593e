"""Random ways to run a steering: particles, resampling, triggers, and what wraps or replaces `smc`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import tokensteer as ts
from tests.faults.choices import Choices
from tests.faults.steerings import Aim

OTHERS = ("particle_gibbs", "repair", "SplitGibbs")


@dataclass(frozen=True)
class Plan:
    """What to run: `smc` on a path, or another sampler on its steering."""

    aim: Aim
    sampler: str
    path: ts.FeynmanKac
    options: dict[str, Any]
    memory: str | None
    keep_states: bool | int

    def run(self, seed: int, **changed: Any) -> ts.Result:
        options = {**self.options, "memory": self.memory, "keep_states": self.keep_states, **changed}
        return ts.smc(self.path, **options, generator=torch.Generator().manual_seed(seed))


def draw_resampler(choices: Choices, particles: int) -> Any:
    schemes = ts.resampling
    plain = ["systematic", "multinomial", "stratified", "residual", "ssp", "one_survivor", "heaviest"]
    match choices.pick("resample", *plain, "partial", "partial", *["nested", "islands"] * (particles % 2 == 0)):
        case "partial":
            return schemes.partial(choices.pick("of", schemes.ssp, schemes.systematic), choices.pick("part", 0.5, 1.0))
        case "nested":
            return schemes.nested(choices.pick("of", schemes.stratified, schemes.residual), 2)
        case "islands":
            counts = [n for n in (1, 2, 4) if particles % n == 0]
            within = choices.pick("of", schemes.systematic, schemes.multinomial, schemes.residual)
            return schemes.islands(choices.pick("islands", *counts), within, choices.pick("fraction", 0.5, 0.9, 1.0))
        case name:
            return getattr(schemes, name)


def draw_trigger(choices: Choices) -> ts.triggers.Trigger:
    triggers = ts.triggers
    made = {
        "ess": triggers.ess_below(0.63),
        "ess of few looks": triggers.ess_below(0.9, looks=2),
        "always": triggers.always,
        "every": triggers.every(2),
        "all": triggers.all_of(triggers.every(2), triggers.ess_below(0.93)),
        "any": triggers.any_of(triggers.every(3), triggers.ess_below(0.37)),
        "never": triggers.never,
        "observe": triggers.observe,
    }
    return made[choices.pick("when", *made, "never")]


def draw_path(choices: Choices, steering: ts.Steering, sampler: str) -> ts.FeynmanKac:
    if sampler == "Auxiliary":
        return ts.Auxiliary(steering)
    if sampler == "Rejuvenated":
        back = choices.pick("back", 1, 1, 2)
        return ts.Rejuvenated(steering, back, choices.pick("tries", 1, 2), choices.pick("redraw", None, None, 2, 3))
    return steering


def fitting_samplers(steering: ts.Steering) -> list[str]:
    """Mostly `smc`, and what is not sure to be refused."""
    kernel, many = steering.model.kernel, len(steering.steps) > 1
    adaptive = steering.twist is not None and isinstance(steering.twist.ramp, ts.Adaptive)
    optimal = isinstance(steering.proposal, ts.Enumerated | ts.Optimal)
    return [
        *["smc"] * 14,
        *["Auxiliary"] * (4 if optimal else 0),
        *["Rejuvenated"] * (3 if many and not adaptive else 0),
        *["particle_gibbs"] * 2,
        *["repair"] * (2 if isinstance(kernel, ts.Ancestral | ts.TauLeap) else 0),
        *["SplitGibbs"] * (2 if kernel.mask_id == ts.NO_MASK else 0),
    ]


def draw_plan(choices: Choices, aim: Aim) -> Plan:
    pick, steering = choices.pick, aim.steering
    sampler = pick("sampler", *fitting_samplers(steering))
    particles = pick("N", *range(1, 9), 13)
    options = {
        "num_particles": particles,
        "populations": steering.model.populations * pick("populations", 1, 1, 2),
        "resample": draw_resampler(choices, particles),
        "when": draw_trigger(choices),
    }
    memory = pick("memory", *[None] * 6, *["2kB"] * 2, "64kB")
    return Plan(
        aim, sampler, draw_path(choices, steering, sampler), options, memory, pick("keep_states", False, True, 1)
    )
