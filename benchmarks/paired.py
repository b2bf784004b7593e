"""Differences of methods on the same prompts, from run folders of a task that reads prompts.

    tokensteer compare emoji --prompts FILE --seeds 0 1 2 --methods best-of-n smc-base smc-grad --out out/a
    python -m benchmarks.paired out/a --against best-of-n --metric judge alignment

What prompts have in common cancels in a difference, so that its error is smaller than those of two means. Metrics are
computed again for each population, by the networks of the run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any

import torch
import tyro
from torch import Generator

from benchmarks.cifar_cells import add
from benchmarks.run_folders import Found, by_size, read_all
from tokensteer.app.runs import answers
from tokensteer.app.runs.jobs import Job
from tokensteer.app.runs.prepare import Environment, make_task, setup_of
from tokensteer.app.runs.prompts import only
from tokensteer.app.runs.recipes import recipe_of
from tokensteer.app.runs.resume import inputs
from tokensteer.app.runs.rows import answer_of, measure
from tokensteer.app.words.numbers import fixed, number
from tokensteer.tasks.common.settings import Settings
from tokensteer.tasks.common.task import SHIPPED, Prompt, Task
from tokensteer.tasks.common.training import say
from tokensteer.workers.scatter import on_device

Values = Mapping[str, Mapping[tuple[int, int], float]]
"""A metric of each population, by its prompt and then by seed and place among the populations of the prompt."""


@dataclass(frozen=True)
class Difference:
    """The mean over prompts of the difference of two methods.

    `error` is its standard error for further prompts and seeds: that over prompts, each of which is one value, the mean
    over its seeds and populations. `same_prompts` is that for further seeds of these prompts, from how seeds and
    populations of a prompt differ; NaN where a prompt has only one.
    """

    mean: float
    error: float
    same_prompts: float
    prompts: int
    pairs: int
    ours: float
    theirs: float


def difference(ours: Values, theirs: Values) -> Difference:
    """Of the populations that both have, paired by prompt, seed and place."""
    pairs = {
        prompt: [(ours[prompt][place], theirs[prompt][place]) for place in ours[prompt] if place in theirs[prompt]]
        for prompt in ours
        if prompt in theirs
    }
    pairs = {prompt: some for prompt, some in pairs.items() if some}
    if not pairs:
        raise ValueError("the two have no prompt and seed in common: run both methods with the same --seeds")
    apart = [[a - b for a, b in some] for some in pairs.values()]
    means, count = [fmean(some) for some in apart], len(apart)
    within = [variance(some) / len(some) if len(some) > 1 else math.nan for some in apart]
    return Difference(
        fmean(means),
        stdev(means) / math.sqrt(count) if count > 1 else math.nan,
        math.sqrt(sum(within)) / count,
        count,
        sum(map(len, apart)),
        *(fmean(fmean(pair[k] for pair in some) for some in pairs.values()) for k in (0, 1)),
    )


@dataclass(frozen=True)
class Options:
    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders of one target."""
    against: str = "best-of-n"
    """The method that the others are compared with, at their N if it has that, else at the only one it has."""
    particles: int | None = None
    """The N of that method instead."""
    metric: tuple[str, ...] = ("judge",)
    """One or more of the columns of the run's table."""
    weights: Path | None = None
    """The folder of networks, if it is not where the run had it; it is not checked then."""
    device: str = "cpu"
    out: Path | None = None
    """A file of JSON lines, which the differences are added to."""


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    groups = by_size(read_all(options.folders))
    families = list(dict.fromkeys(group[0].row.family for group in groups.values()))
    if options.against not in families:
        raise ValueError(f"no run of {options.against}: give --against one of {', '.join(families)}")
    values = cache(lambda place, metric: _values(groups[place], metric, options))
    lines: list[str] = []
    for place, other in _partners(groups, options):
        for metric in options.metric:
            found = difference(values(place, metric), values(other, metric))
            lines.append(_line(metric, groups[place], groups[other], found))
            if options.out is not None:
                add(options.out, _stored(metric, place, other, found))
    sys.stdout.write("\n".join([*HEAD, *lines]) + "\n")


Place = tuple[str, int]
"""A method and its number of particles."""


def _partners(groups: Mapping[Place, Sequence[Found]], options: Options) -> Iterator[tuple[Place, Place]]:
    """Each group with the one that it is compared with."""
    known = {place: group[0].row for place, group in groups.items()}
    every = {place: row for place, row in known.items() if row.family == options.against}
    for place, row in known.items():
        if row.family == options.against:
            continue
        others = {p: r for p, r in every.items() if r.variant == row.variant} or every
        wanted = row.particles if options.particles is None else options.particles
        here = [p for p, r in others.items() if r.particles == wanted]
        if not here and options.particles is None:
            here = list(others)
        if len(here) == 1:
            yield place, here[0]
        else:
            sizes = ", ".join(str(r.particles) for r in others.values())
            say(f"Left out: {row.method}, N = {row.particles}. {options.against} has N = {sizes}: give --particles")


def _values(group: Sequence[Found], metric: str, options: Options) -> Values:
    found: dict[str, dict[tuple[int, int], float]] = {}
    for one in group:
        for prompt, measured in values_of(one, options.weights, options.device).items():
            for place, metrics in measured.items():
                if metric not in metrics:
                    raise ValueError(
                        f"{one} has no {metric} of a single population: give --metric of {', '.join(metrics)}"
                    )
                found.setdefault(prompt, {})[one.row.seed, place] = metrics[metric]
    return found


@cache
def values_of(one: Found, weights: Path | None, device: str) -> Mapping[str, Mapping[int, Mapping[str, float]]]:
    """All metrics of each population that lives, by prompt and by place among the populations of the prompt. Draws that
    a metric takes are other ones than those of the run's table."""
    job, where = job_of(one.row.job), _where(one, weights, device)
    asked = _prompts(job, where)
    lost = {failed["id"] for failed in one.row.failed}
    prompts = [k for k, prompt in enumerate(asked) if prompt.id not in lost]
    result = replace(on_device(one.row.result, device), generator=Generator(device).manual_seed(0))
    answer, kept = answer_of(recipe_of(job.method), result)
    each, rest = divmod(len(kept), len(prompts))
    if rest:
        raise ValueError(f"{one} has {len(kept)} populations, which {len(prompts)} prompts do not share equally")
    say(f"{one}: {len(kept)} populations")
    found: dict[str, dict[int, Mapping[str, float]]] = {}
    for place, b in enumerate(kept.nonzero().flatten().tolist()):
        k = prompts[b // each]
        population = answers.some(answer, torch.tensor([place], device=device))
        metrics = measure(_of_one(job.task, job.settings.of_task(), where, k), population, torch.ones(1).bool())
        named = {name: value.mean for name, value in metrics.items() if math.isfinite(value.mean)}
        found.setdefault(f"{asked[k].id}: {asked[k].text}", {})[b % each] = named
    return found


def _where(one: Found, weights: Path | None, device: str) -> Environment:
    """The networks of a row. Raises ValueError if they, or other files that the row depends on, have changed."""
    stored, job = one.config["weights"], job_of(one.row.job)
    where = Environment(weights or (SHIPPED if stored == "shipped" else Path(stored)), device)
    for name, digest in inputs([job], where).items():
        given = name == "weights" and weights is not None
        if not given and one.config.get("inputs", {}).get(name) != digest:
            more = ", or give --weights" if name == "weights" else ""
            raise ValueError(f"the files of --{name} are not those of {one.folder}: bring them back{more}")
    return where


def _prompts(job: Job, where: Environment) -> Sequence[Prompt]:
    task = _task(job.task, job.settings.of_task(), where)
    if task.prompted is None:
        raise ValueError(f"{job.task} reads no prompts, by which methods are compared: emoji and text do")
    return task.prompted.prompts


@cache
def _task(name: str, settings: Settings, where: Environment) -> Task:
    """Rows of the same settings share a task and its networks."""
    return make_task(setup_of(Job(name, "pretrained", 1, 1, settings=settings), where), name)


@cache
def _of_one(name: str, settings: Settings, where: Environment, prompt: int) -> Task:
    return only(_task(name, settings, where), [prompt])


def job_of(stored: Mapping[str, Any]) -> Job:
    """The job that a row has stored, as far as it decides the task."""
    known = {field.name: stored[field.name] for field in fields(Settings) if stored.get(field.name) is not None}
    for name in ("prompts", "schema"):
        if name in known:
            known[name] = Path(known[name])
    lists = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
    sizes = (stored["particles"], stored["populations"], stored["seed"])
    return Job(stored["task"], stored["method"], *sizes, Settings(**{**known, **lists}))


# ---- what is written

HEAD = (
    "| | against | metric | its mean | other | difference | for these prompts | prompts, pairs | seconds |",
    "|---|---|---|---|---|---|---|---|---|",
)


def _line(metric: str, group: Sequence[Found], others: Sequence[Found], found: Difference) -> str:
    """A row of a table. Seconds are those of a population of each."""
    named = [f"{some[0].row.method}, N = {some[0].row.particles}" for some in (group, others)]
    small = min((e for e in (found.error, found.same_prompts) if math.isfinite(e) and e > 0), default=math.nan)
    places = 4 if math.isnan(small) else min(6, max(0, 1 - math.floor(math.log10(small))))
    means = [fixed(value, places) for value in (found.ours, found.theirs, found.mean)]
    error, same = (f"± {fixed(e, places)}" if math.isfinite(e) else "" for e in (found.error, found.same_prompts))
    took = " against ".join(number(_seconds(some), 2) for some in (group, others))
    cells = [*named, metric, *means[:2], f"{means[2]} {error}".strip(), same, f"{found.prompts}, {found.pairs}", took]
    return f"| {' | '.join(cells)} |"


def _seconds(group: Sequence[Found]) -> float:
    return fmean(one.row.seconds / one.row.populations for one in group)


def _stored(metric: str, place: Place, other: Place, found: Difference) -> dict[str, Any]:
    known = {name: value if math.isfinite(value) else None for name, value in asdict(found).items()}
    sizes = {"method": place[0], "particles": place[1], "against": other[0], "its particles": other[1]}
    return {**sizes, "metric": metric, **known}


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
