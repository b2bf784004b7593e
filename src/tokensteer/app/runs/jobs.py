"""What is to be run: one job for each row of the results, planned before anything heavy is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tokensteer.app.words.lookup import choose
from tokensteer.core.numerics.domains import check_seed

REMASK = 0.1
"""The cap of ReMDM where a recipe compares it with plain masked diffusion."""


MOST = {"particles": 10**9, "populations": 10**9, "steps": 10**6, "draws": 10**6}
"""More than any machine has room or time for."""


@dataclass(frozen=True)
class Job:
    """A method on a task, with so many particles, and so many populations for each prompt if the task reads prompts.
    What is None is left to the task or the method.

    `extra` names what tells it from other jobs of the same method.
    """

    task: str
    method: str
    particles: int
    populations: int
    seed: int = 0
    steps: int = 100
    goal: int | None = None
    kl: float | None = None
    draws: int | None = None
    noise: str | None = None
    ramp: str | None = None
    trigger: str | None = None
    remask: float = 0.0
    prompts: str | None = None
    reward: str | None = None
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, example in (("particles", 16), ("populations", 8), ("steps", 100), ("draws", 10)):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"--{name} must be at least 1, got {count}; try {example}")
            if count is not None and count > MOST[name]:
                raise ValueError(f"--{name} must be at most {MOST[name]:,}, got {count:,}; try {example}")
        if self.particles * self.populations > MOST["particles"]:
            raise ValueError(
                f"--particles times --populations must be at most {MOST['particles']:,}, got {self.particles:,} times "
                f"{self.populations:,}: use fewer of them"
            )
        check_seed("--seed", self.seed)
        if self.kl is not None and not 0 < self.kl < math.inf:
            raise ValueError(f"--kl must be positive and finite, got {self.kl:g}: it divides the reward")
        if not 0 <= self.remask <= 1:
            raise ValueError(f"--remask must lie in [0, 1], got {self.remask:g}: it is a probability, 0 for none")

    @property
    def label(self) -> str:
        return ", ".join((self.method, *self.extra))

    @property
    def file(self) -> str:
        """A name for its files."""
        words = (self.task, self.method, *self.extra, f"n{self.particles}", f"s{self.seed}")
        return "-".join("".join(c if c.isalnum() or c in ".-" else "-" for c in word) for word in words)


@dataclass(frozen=True)
class Size:
    """How a recipe is run unless told otherwise."""

    methods: tuple[str, ...] | None = ("smc-base", "smc-grad")
    particles: tuple[int, ...] = (16,)
    populations: int = 8


Vary = Callable[[Job], Sequence[Job]]


def plain(job: Job) -> Sequence[Job]:
    return [job]


def ramps(job: Job) -> Sequence[Job]:
    """The full reward after a tenth, two tenths, … of the time, without and with remasking."""
    kernels: list[tuple[str, float]] = [("MDM", 0.0), ("ReMDM", job.remask or REMASK)]
    return [
        replace(job, ramp=f"clipped:{k}", remask=remask, extra=(kernel, f"k = {k}"))
        for (kernel, remask), k in product(kernels, range(1, 11))
    ]


def draws(job: Job) -> Sequence[Job]:
    """Estimates of the reward from few and from many clean samples."""
    return [replace(job, draws=m, extra=(f"M = {m}",)) for m in (1, 2, 4, 10, 25)]


def traces(job: Job) -> Sequence[Job]:
    """No resampling, with the weights looked at in every step: how fast a proposal loses its particles."""
    return [replace(job, trigger="observe", extra=("no resampling",))]


RECIPES: dict[str, tuple[Vary, Size]] = {
    "methods": (plain, Size(None)),
    "ramps": (ramps, Size()),
    "draws": (draws, Size()),
    "traces": (traces, Size(populations=30)),
}


def plan(
    recipe: str,
    methods: Sequence[str] | None,
    particles: Sequence[int] | None,
    populations: int | None,
    seeds: Sequence[int],
    default_methods: Sequence[str],
    common: dict[str, Any],
) -> list[Job]:
    """All jobs of a comparison, those that share a method one after the other."""
    vary, size = choose(recipe, RECIPES, "recipe")
    many = size.populations if populations is None else populations
    runs = product(methods or size.methods or default_methods, particles or size.particles, seeds)
    first = [Job(method=m, particles=n, populations=many, seed=seed, **common) for m, n, seed in runs]
    return [varied for job in first for varied in vary(job)]
