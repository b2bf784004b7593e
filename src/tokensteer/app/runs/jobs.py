"""What is to be run: one job for each row of the results, planned before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

from tokensteer.app.words.lookup import choose
from tokensteer.core.numerics.domains import check_seed
from tokensteer.tasks.common.settings import Settings, check_count

REMASK = 0.1
"""The cap of ReMDM where a recipe compares it with plain masked diffusion."""


MOST = 10**9
"""More particles than any machine has room for."""


@dataclass(frozen=True)
class Job:
    """A method on a task, with so many particles, and so many populations for each prompt if the task reads prompts.

    `extra` names what tells it from other jobs of the same method.
    """

    task: str
    method: str
    particles: int
    populations: int
    seed: int = 0
    settings: Settings = field(default_factory=Settings)
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_count("particles", self.particles, MOST, 16)
        check_count("populations", self.populations, MOST, 8)
        if self.particles * self.populations > MOST:
            raise ValueError(
                f"--particles times --populations must be at most {MOST:,}, got {self.particles:,} times "
                f"{self.populations:,}: use fewer of them"
            )
        check_seed("--seed", self.seed)
        self.settings.check()

    @property
    def label(self) -> str:
        return ", ".join((self.method, *self.extra))

    def stored(self) -> dict[str, Any]:
        """What config.json and results.json have of it: its settings beside all else."""
        prompts, known = self.settings.prompts, asdict(self)
        return known | known.pop("settings") | {"prompts": None if prompts is None else str(prompts)}

    def varied(self, *extra: str, **settings: Any) -> Job:
        """The same with other settings, and the words that tell it from others."""
        return replace(self, settings=replace(self.settings, **settings), extra=extra)

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
    kernels: list[tuple[str, float]] = [("MDM", 0.0), ("ReMDM", job.settings.remask or REMASK)]
    return [
        job.varied(kernel, f"k = {k}", ramp=f"clipped:{k}", remask=remask)
        for (kernel, remask), k in product(kernels, range(1, 11))
    ]


def draws(job: Job) -> Sequence[Job]:
    """Estimates of the reward from few and from many clean samples."""
    return [job.varied(f"M = {m}", draws=m) for m in (1, 2, 4, 10, 25)]


def traces(job: Job) -> Sequence[Job]:
    """No resampling, with the weights looked at in every step: how fast a proposal loses its particles."""
    return [job.varied("no resampling", trigger="observe")]


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
    task: str,
    settings: Settings,
) -> list[Job]:
    """All jobs of a comparison, those that share a method one after the other."""
    vary, size = choose(recipe, RECIPES, "recipe")
    many = size.populations if populations is None else populations
    runs = product(methods or size.methods or default_methods, particles or size.particles, seeds)
    first = [Job(task, m, n, many, seed, settings) for m, n, seed in runs]
    return [varied for job in first for varied in vary(job)]
