"""Jobs, one for each row of the results, planned before any network is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from tokensteer.app.options import Compare
from tokensteer.app.words.lookup import choose
from tokensteer.core.numerics.domains import check_seed
from tokensteer.tasks.catalogue import TASKS
from tokensteer.tasks.common.settings import Settings, check_count

REMASK = 0.1
"""The cap of ReMDM where a recipe compares it with plain masked diffusion."""
MOST = 10**9
"""More particles than any machine has room for."""


@dataclass(frozen=True)
class Job:
    """A method on a task. `populations` is per prompt if the task reads prompts. `extra` has the words that distinguish
    it from other jobs of the same method. `budget`, a time or a number of rows, is for a method that pilots plan.
    `why` it has so many particles, if they were measured. With `keep_states` the particles of every step are stored for
    the first populations. Its units are all of it or, if it has several `islands`, its populations shared out to them;
    with `split_prompts` or several islands each prompt has units of its own."""

    task: str
    method: str
    particles: int
    populations: int
    seed: int = 0
    settings: Settings = field(default_factory=Settings)
    extra: tuple[str, ...] = ()
    budget: str | None = None
    why: str | None = None
    keep_states: bool = False
    islands: int = 1
    split_prompts: bool = False

    def __post_init__(self) -> None:
        check_count("particles", self.particles, MOST, 16)
        check_count("populations", self.populations, MOST, 8)
        if self.particles * self.populations > MOST:
            raise ValueError(
                f"--particles times --populations must be at most {MOST:,}, got {self.particles:,} times "
                f"{self.populations:,}: use fewer of them"
            )
        check_count("islands", self.islands, self.populations, 1)
        check_seed("--seed", self.seed)
        self.settings.check()

    @property
    def label(self) -> str:
        return ", ".join((self.method, *self.extra))

    def stored(self) -> dict[str, Any]:
        """The job for results.json, with its settings beside the other fields. What is None is left out: see the
        row's `resolved`."""
        known = asdict(self)
        whole = {name: value for name, value in (known | known.pop("settings")).items() if value is not None}
        return {name: str(value) if isinstance(value, Path) else value for name, value in whole.items()}

    def varied(self, *extra: str, **settings: Any) -> Job:
        """The job with other settings, and the words that distinguish it."""
        return replace(self, settings=replace(self.settings, **settings), extra=extra)

    @property
    def file(self) -> str:
        """The name of its files."""
        words = (self.task, self.method, *self.extra, f"n{self.particles}", f"s{self.seed}")
        return "-".join("".join(c if c.isalnum() or c in ".-" else "-" for c in word) for word in words)


def ramps(job: Job) -> Sequence[Job]:
    """The full reward after a tenth, two tenths, … of the time, without and with remasking."""
    kernels: list[tuple[str, float]] = [("MDM", 0.0), ("ReMDM", job.settings.remask or REMASK)]
    return [
        job.varied(kernel, f"k = {k}", ramp=f"clipped:{k}", remask=remask)
        for (kernel, remask), k in product(kernels, range(1, 11))
    ]


def draws(job: Job) -> Sequence[Job]:
    """Estimates of the reward from 1 to 25 clean samples."""
    return [job.varied(f"M = {m}", draws=m) for m in (1, 2, 4, 8, 10, 25)]


def steps(job: Job) -> Sequence[Job]:
    """From few steps, which open many sites at once, to many."""
    return [job.varied(f"T = {count}", steps=count) for count in (10, 25, 50, 100, 200)]


def kls(job: Job) -> Sequence[Job]:
    """From a quarter of the kl to four times as much; the reward's own is the middle unless one is given."""
    entry = TASKS[job.task]
    own = entry.rewards.get(job.settings.reward or "", entry.kl)
    middle = own if job.settings.kl is None else job.settings.kl
    return [job.varied(f"kl = {factor * middle:g}", kl=factor * middle) for factor in (0.25, 0.5, 1.0, 2.0, 4.0)]


def resampling(job: Job) -> Sequence[Job]:
    """Schemes, each at several triggers, and no resampling at all."""
    fifth = max(1, (job.settings.steps or 100) // 5)
    schemes = ("systematic", "stratified", "residual", "multinomial")
    both = product(("ess:0.5", "always", f"every:{fifth}"), schemes)
    found = [job.varied(trigger, scheme, trigger=trigger, resample=scheme) for trigger, scheme in both]
    return [*found, job.varied("never", trigger="never")]


def traces(job: Job) -> Sequence[Job]:
    """No resampling, with weights computed in every step: how fast the ESS of a proposal falls."""
    return [job.varied("no resampling", trigger="observe")]


TWO = ("smc-base", "smc-grad")
RECIPES: dict[str, tuple[Callable[[Job], Sequence[Job]], int, Sequence[str] | None]] = {
    "methods": (lambda job: [job], 8, None),
    "ramps": (ramps, 8, ("smc-grad",)),
    "draws": (draws, 8, TWO),
    "steps": (steps, 8, TWO),
    "kl": (kls, 8, TWO),
    "resampling": (resampling, 8, TWO),
    "traces": (traces, 30, TWO),
}
"""The variants of a job in each recipe, and the default number of populations and methods; None for the task's."""


def plan(compare: Compare, settings: Settings, usual: Sequence[str]) -> list[Job]:
    """All jobs of a comparison, those of the same method one after the other. By default the recipe "methods" has the
    `usual` methods of the task, and the others have their own."""
    vary, populations, own = choose(compare.recipe, RECIPES, "recipe")
    many = populations if compare.populations is None else compare.populations
    methods = compare.methods or own or usual
    runs = product(methods, compare.particles or (16,), compare.seeds)
    first = [Job(compare.task, m, n, many, seed, settings) for m, n, seed in runs]
    own_units = {"islands": 1 if compare.islands is None else compare.islands, "split_prompts": compare.split_prompts}
    first = [replace(job, keep_states=compare.keep_states, **own_units) for job in first]
    return [varied for job in first for varied in vary(job)]
