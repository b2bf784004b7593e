"""log Z and the target against enumeration, as z-scores over many populations.

exp(log_z) of a population is unbiased for Z, and the mean of its weights over the particles within a set A of sequences
is unbiased for Z · target(A). So the means over populations have z-scores of mean 0 and variance 1: one of Z_hat, which
knows nothing of the samples, and one of A, centred by Z_hat · target(A), which does. A is a random half of all
sequences. If the kernel has a memory, and cannot be enumerated, plain sampling from the model weighted at the end takes
the place of enumeration.

A run whose |z| is above `SUSPECT` is looked at again with more populations and other seeds, and is wrong if |z| is
above `IMPOSSIBLE` at the last look. Weights have heavier tails than normal ones: a gradient from one draw can leave a
token so little probability that rare populations have most of the mean, which looks too low until one of them is
seen; hence the last look, and a narrower bound above than below: no rare population makes a mean look too high by
many standard errors. The mean of z² shows an error too small for any single score, over all scores and over those of
each part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

import tokensteer as ts
from tests.faults.choices import Choices
from tests.faults.runs import Plan
from tests.faults.steerings import Aim
from tokensteer.testing import enumerate_steering
from tokensteer.testing.exact import Enumeration

LOOKS = ((1, 200), (1, 6000), (20, 6000))  # runs, and populations in each
PARTICLES = 4  # at most: the fewer, the more every weight matters
SUSPECT = 3.5
IMPOSSIBLE = (-6.0, 4.5)  # of Z_hat; below the first or above the second it is wrong
SPREAD = 3.0  # at most the variance of z² allowed for; 2 for normal scores
ERRORS = 6.0  # standard errors that a mean of z² may be away from 1
ENOUGH = 30  # scores for a mean of z²
PLAIN = 20_000  # samples that take the place of an enumeration
LEAST = -700.0  # exp of less is 0: no token of that probability is ever drawn
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the mean of exp(log_z), relative to Z
PARTS = (
    *("kernel", "inner", "model", "convention", "form", "dtype", "proposal", "second member", "gradient base", "rule"),
    *("estimator", "average", "potential", "ramp", "learned", "sampler", "resample", "when", "N", "steps", "templates"),
)  # the choices whose scores are looked at by themselves


Scored = tuple[float, dict[str, str]]
"""A score, and the choices of `PARTS` that it belongs to."""


@dataclass(frozen=True)
class Truth:
    """log Z of one population, the sequences of A as a table (V,) * L of 0 and 1, target(A), and the standard errors of
    Z, relative to Z, and of target(A): 0 if they were enumerated."""

    log_z: float
    chosen: Tensor
    share: float
    errors: tuple[float, float] = (0.0, 0.0)


@lru_cache(maxsize=8)
def truth(aim: Aim, row: int, seed: int) -> Truth:
    """Runs of one steering share it."""
    steering = aim.of_population(row)
    generator = torch.Generator().manual_seed(seed)
    size, length = steering.model.vocab_size, aim.made.canvas.shape[1]
    chosen = (torch.rand((size,) * length, generator=generator) < 0.5).double()
    exact = enumerated(steering)
    if exact is not None:
        inside = chosen[tuple(exact.states[exact.clean].unbind(-1))]
        share = float((exact.target * inside).sum()) if exact.log_z > -math.inf else 0.0
        return Truth(exact.log_z, chosen, share)
    late = None if steering.twist is None else replace(steering.twist, ramp=ts.ramps.end)
    plain = ts.smc(replace(steering, twist=late), 1, PLAIN, when=ts.triggers.never, generator=generator)
    w = plain.log_w.exp().squeeze(-1)
    z = float(w.mean())
    if z == 0:
        return Truth(-math.inf, chosen, 0.0)
    inside = chosen[tuple(plain.samples[:, 0].unbind(-1))]
    share = float((w * inside).mean()) / z
    errors = (float(each.std()) / z / math.sqrt(PLAIN) for each in (w, w * (inside - share)))
    return Truth(math.log(z), chosen, share, (next(errors), next(errors)))


def enumerated(steering: ts.Steering) -> Enumeration | None:
    try:
        return enumerate_steering(steering)
    except ValueError as error:
        if "the kernel has a memory" in str(error):
            return None
        raise


def ratios(plan: Plan, row: int, exact: Truth, populations: int, seed: int) -> Tensor:
    """Z_hat / Z of each of so many populations of one template, and what of it lies in A, centred: (2, populations)."""
    templates = plan.aim.steering.model.populations
    particles = plan.options["num_particles"]
    particles = particles if particles <= PARTICLES else PARTICLES - particles % 2  # groups of two stay whole
    memory = plan.memory if populations == LOOKS[0][1] else None  # row by row, a long look would take half an hour
    changed = {"num_particles": particles, "populations": templates * populations, "memory": memory}
    result = plan.run(seed, keep_states=False, **changed)
    log_z, log_w = (values.unflatten(0, (templates, populations))[row] for values in (result.log_z, result.log_w))
    samples = result.samples.unflatten(0, (templates, populations))[row]
    inside = exact.chosen[tuple(samples.unbind(-1))] - exact.share
    return torch.stack([(log_z - exact.log_z).exp(), ((log_w - exact.log_z).exp() * inside).mean(-1)])


@dataclass
class Scores:
    """The z-scores of each kind with the choices they belong to, and what is wrong."""

    z: defaultdict[str, list[Scored]] = field(default_factory=lambda: defaultdict[str, list[Scored]](list[Scored]))
    wrong: list[str] = field(default_factory=list[str])

    def judge(self, choices: Choices, plan: Plan, row: int, seed: int) -> None:
        """Compare a run with enumeration, at one of its templates."""
        canvas, model = plan.aim.made.canvas, plan.aim.steering.model
        if plan.options["resample"] is ts.resampling.heaviest:  # by design it has no known target
            return
        if not (canvas[row] == model.kernel.mask_id).any():  # a template without a free site is no model alone
            return
        exact = truth(plan.aim, row, choices.seed)
        if exact.log_z < LEAST:
            log_z = plan.run(seed, keep_states=False).log_z.view(model.populations, -1)[row]
            if (log_z > LEAST).any():
                self._add(choices, f"log Z is {exact.log_z:.6g}, and weights are larger")
            return
        # A look-ahead of no mass is a floor as well, and a gradient without a clip leaves some tokens next to nothing.
        # Rare populations then have most of the mean, and only a mean that is too high is a finding.
        ahead = model.looks_ahead or plan.aim.rule is not None
        heavy = (ahead and not plan.aim.made.full) or choices.made.get("clip", 0.0) is None
        rounding = ROUNDING[model.dtype]
        first = ratios(plan, row, exact, LOOKS[0][1], seed)
        for which, name, expected in ((0, "log Z", 1.0), (1, "the target", 0.0)):
            if which == 1 and (heavy or exact.share in (0.0, 1.0)):
                continue
            error, values = exact.errors[which], first[which] - expected
            z = z_score(values, error, rounding)
            for look, (runs, populations) in enumerate(LOOKS[1:], 1):
                if z is not None and abs(z) > SUSPECT:
                    more = [ratios(plan, row, exact, populations, seed + 1000 * look + k)[which] for k in range(runs)]
                    z = z_score(torch.cat(more) - expected, error, rounding)
            if z is None:
                continue
            if heavy:
                self._demand(choices, name, z, -math.inf, IMPOSSIBLE[1])
            else:
                self.add(choices, name, z, *IMPOSSIBLE)

    def add(self, choices: Choices, name: str, z: float, low: float, high: float) -> None:
        """Keep a score of this name, which is wrong outside these bounds."""
        self._demand(choices, name, z, low, high)
        made = {part: str(choices.made[part]) for part in PARTS if part in choices.made}
        self.z[name].append((z, made))

    def _demand(self, choices: Choices, name: str, z: float, low: float, high: float) -> None:
        if not low < z < high:
            self._add(choices, f"{name} is off by {z:.1f} standard errors")

    def _add(self, choices: Choices, what: str) -> None:
        again = f"python -m tests.faults.fuzz --seed {choices.seed} --only {choices.index}"
        self.wrong.append(f"{what}\n  {choices}\n  {again}")

    def findings(self) -> list[str]:
        far = [
            f"{name}: the mean of {len(z)} z² is {mean_square(z):.3f}, not within {bound(z):.3f} of 1"
            for name, z in self.groups()
            if len(z) >= ENOUGH and not abs(mean_square(z) - 1.0) <= bound(z)
        ]
        return self.wrong + far

    def groups(self) -> Iterator[tuple[str, list[float]]]:
        """All scores of either kind, and those of each choice of each part, by a name."""
        for kind, scores in self.z.items():
            by_choice = defaultdict[str, list[float]](list[float])
            for z, made in scores:
                for part, choice in made.items():
                    by_choice[f"{kind}, {part}={choice}"].append(z)
            yield kind, [z for z, _ in scores]
            yield from by_choice.items()

    def __str__(self) -> str:
        shown = list[str]()
        for kind, scores in self.z.items():
            z = [each for each, _ in scores]
            worst = max(map(abs, z), default=0.0)
            shown.append(
                f"{len(z)} scores of {kind}, mean z² {mean_square(z):.3f} (1 ± {bound(z):.3f}), largest {worst:.2f}"
            )
        return "; ".join(shown) or "no scores"


def z_score(values: Tensor, error: float, rounding: float) -> float | None:
    """Of values whose mean should be 0, with the standard error of what they are compared with. Values that are equal
    up to rounding have none: None if they are 0, and infinite if they are not."""
    if float(values.std()) < rounding and error < rounding:
        return None if abs(float(values.mean())) < rounding else math.copysign(math.inf, float(values.mean()))
    return float(values.mean()) / math.hypot(float(values.std()) / math.sqrt(len(values)), error)


def mean_square(z: list[float]) -> float:
    return sum(each * each for each in z) / max(1, len(z))


def bound(z: list[float]) -> float:
    """How far a mean of z² may be from 1."""
    return ERRORS * math.sqrt(SPREAD / max(1, len(z)))
