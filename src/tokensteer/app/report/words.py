"""Names, colours and sentences for rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tokensteer.app.report.folder import Row
from tokensteer.app.report.intervals import count, differ, interval
from tokensteer.app.words.methods import USUAL
from tokensteer.app.words.metrics import HIGHER, LOWER, columns, title
from tokensteer.app.words.numbers import duration, plural, short, with_error

UNBROKEN = "\u00a0=\u00a0"
COLOURS = 24  # how many marks there are besides grey: six colours in four patterns
HEADLINES = 5  # how many methods are shown first
FLOOR = " floor"
"""The end of metrics that are those of exact draws."""


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def anchor(family: str) -> str:
    """The id of a method's description."""
    return f"method-{family}"


def several_sizes(rows: Sequence[Row]) -> bool:
    """Whether some method has rows of different numbers of particles."""
    return len({(row.method, row.particles) for row in rows}) > len({row.method for row in rows})


def naming(rows: Sequence[Row], briefly: bool = False) -> Callable[[Row], str]:
    """A function that names a row by its method, and by its size and seed where `rows` differ in them; `briefly`
    without the size where the method has only one."""
    sizes, seeds = {row.particles for row in rows}, {row.seed for row in rows}
    sized = several_sizes(rows) if briefly else len(sizes) > 1

    def name(row: Row) -> str:
        size = f", N = {row.particles}" if sized else ""
        seed = f", seed {row.seed}" if len(seeds) > 1 else ""
        return f"{row.method}{size}{seed}".replace(" = ", UNBROKEN)

    return name


def colours_of(rows: Sequence[Row]) -> dict[str, int]:
    """The colour of each method: grey for the model alone, then one after the other. With more methods than colours,
    variants that end in the same words share one."""
    methods = {row.method: row for row in rows if row.method != "pretrained"}
    crowded = len(methods) > COLOURS
    words = {method: row.variant[-1] if crowded and row.variant else method for method, row in methods.items()}
    places = list(dict.fromkeys(words.values()))
    return {"pretrained": 0, **{method: 1 + places.index(words[method]) % COLOURS for method in methods}}


def resampled(ancestors: Tensor) -> bool:
    """Whether some particle of some step has another parent than the one in its place."""
    return bool((ancestors[1:] != torch.arange(ancestors.shape[-1], device=ancestors.device)).any())


def most_telling(rows: Sequence[Row]) -> int:
    """The place of the row whose particles are shown first: one that resampled, of SMC if there is any."""
    worth = [(2 if row.method.startswith("smc") else 1) * resampled(row.result.ancestors) for row in rows]
    return worth.index(max(worth))


def comparisons(rows: Sequence[Row]) -> int:
    """All pairs of rows in all metrics that have a better direction."""
    return max(1, math.comb(len(rows), 2) * len([m for m in metrics_of(rows) if m in HIGHER | LOWER]))


def leaders(rows: Sequence[Row], metric: str) -> tuple[Row | None, list[Row]]:
    """The best row by a metric, and the rows that do not differ from it at the level of the whole table."""
    known = [row for row in rows if metric in row.metrics and math.isfinite(row.metrics[metric].mean)]
    sign = 1.0 if metric in HIGHER else -1.0
    if len(known) < 2 or metric not in HIGHER | LOWER:
        return None, []
    best = max(known, key=lambda row: sign * row.metrics[metric].mean)

    def level(row: Row) -> bool:
        sizes = count(row, metric), count(best, metric)
        return not differ(row.metrics[metric], sizes[0], best.metrics[metric], sizes[1], comparisons(rows))

    return best, [row for row in known if row is not best and level(row)]


def metrics_of(rows: Sequence[Row]) -> list[str]:
    """The metrics of some rows that are shown, in their order. Floors are rows of their own."""
    return [metric for metric in columns(row.metrics for row in rows) if not metric.endswith(FLOOR)]


def main_metric(rows: Sequence[Row]) -> str | None:
    return next((metric for metric in metrics_of(rows) if metric in HIGHER | LOWER), None)


def recommended(rows: Sequence[Row]) -> Row:
    """The best row by the main metric, of those that sample the target if there are any."""
    exact = [row for row in rows if row.exact and row.family != "pretrained"] or list(rows)
    main = main_metric(exact)
    return (None if main is None else leaders(exact, main)[0]) or exact[0]


def spent(row: Row) -> str:
    """Time and network rows of a row."""
    return f"{duration(row.seconds)} and {short(sum(row.rows.values()))} network rows"


def verdict(rows: Sequence[Row]) -> str:
    """The recommendation in a sentence."""
    name, best, main = naming(rows), recommended(rows), main_metric(rows)
    if main is None or main not in best.metrics:
        return f"{plural(len(rows), 'row')} finished."
    reached = f"{title(main)}, {with_error(interval(best, main))},"
    if len(rows) == 1:
        return f"{name(best)}: {title(main)} {with_error(interval(best, main))}, in {spent(best)}."
    side = "highest" if main in HIGHER else "lowest"
    said = f"Use {name(best)}: of the methods that sample the target it has the {side} {reached} in {spent(best)}"
    others = [row for row in rows if row.exact and row.family != "pretrained" and row is not best]
    _, level = leaders([best, *others], main)
    if level:
        quick = min(level, key=lambda row: row.seconds)
        does = "does" if len(level) == 1 else "do"
        same = f"{plural(len(level), 'other')} {does} not differ from it at the 5% level"
        which = "it" if len(level) == 1 else "the quickest of these"
        said += f"; {same}; {which}, {name(quick)} with {with_error(interval(quick, main))}, took {spent(quick)}"
    return said + "."


def headlines(rows: Sequence[Row]) -> list[str]:
    """The methods that are shown first: all of up to six and all variants, otherwise the recommended and the usual, and
    those with the best main metric of a task."""
    methods = list(dict.fromkeys(row.method for row in rows))
    if len(methods) <= HEADLINES + 1 or any(row.variant for row in rows):
        return methods
    tasks = [[row for row in rows if row.task == task] for task in {row.task: 0 for row in rows}]
    first = [
        method for method in (*(recommended(some).method for some in tasks), *USUAL, *methods) if method in methods
    ]
    starred = [leaders(some, main)[0] for some in tasks if (main := main_metric(some)) is not None]
    return list(dict.fromkeys([*list(dict.fromkeys(first))[:HEADLINES], *(row.method for row in starred if row)]))
