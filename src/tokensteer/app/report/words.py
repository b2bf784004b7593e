"""Names, colours and sentences for rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tokensteer.app.report.folder import Row
from tokensteer.app.words.metrics import HIGHER, LOWER, columns, title
from tokensteer.app.words.numbers import number, with_error

UNBROKEN = "\u00a0=\u00a0"
COLOURS = 12  # how many colours there are besides grey


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def naming(rows: Sequence[Row]) -> Callable[[Row], str]:
    """A function that names a row by its method, and by its size and seed where `rows` differ in them."""
    sizes, seeds = {row.particles for row in rows}, {row.seed for row in rows}

    def name(row: Row) -> str:
        size = f", N = {row.particles}" if len(sizes) > 1 else ""
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


def most_telling(rows: Sequence[Row]) -> int:
    """The place of the row whose particles are shown first: one that resampled, of SMC if there is any."""
    resampled = [bool((row.result.ancestors[1:] != row.result.ancestors[:1]).any()) for row in rows]
    worth = [(2 if row.method.startswith("smc") else 1) * any_ for row, any_ in zip(rows, resampled, strict=True)]
    return worth.index(max(worth))


def leaders(rows: Sequence[Row], metric: str) -> tuple[Row | None, list[Row]]:
    """The best row by a metric, and the rows within two standard errors of it."""
    known = [row for row in rows if metric in row.metrics and math.isfinite(row.metrics[metric].mean)]
    sign = 1.0 if metric in HIGHER else -1.0
    if len(known) < 2 or metric not in HIGHER | LOWER:
        return None, []
    best = max(known, key=lambda row: sign * row.metrics[metric].mean)
    top = best.metrics[metric]

    def level(row: Row) -> bool:
        here = row.metrics[metric]
        errors = [e for e in (here.error, top.error) if math.isfinite(e)]
        return abs(top.mean - here.mean) <= 2.0 * math.hypot(*errors)

    return best, [row for row in known if row is not best and level(row)]


def metrics_of(rows: Sequence[Row]) -> list[str]:
    """The metrics of some rows that are shown, in their order."""
    return columns(row.metrics for row in rows)


def verdict(rows: Sequence[Row]) -> str:
    """The result of a comparison in a sentence or two."""
    name = naming(rows)
    main = next((metric for metric in metrics_of(rows) if metric in HIGHER | LOWER), None)
    if main is not None and len(rows) == 1:
        return f"{name(rows[0])} reached {title(main)} {with_error(rows[0].metrics[main])}."
    best, level = (None, []) if main is None else leaders(rows, main)
    if main is None or best is None:
        return f"{plural(len(rows), 'run')} finished."
    side = "highest" if main in HIGHER else "lowest"
    said = f"{name(best)} has the {side} {title(main)}, {with_error(best.metrics[main])}"
    if level:
        few = listed([name(row) for row in level]) if len(level) <= 3 else f"{len(level)} others"
        are = "is" if len(level) == 1 else "are"
        said += f", but {few} {are} within two standard errors of it"
    said += "."
    cheap = min(rows, key=lambda row: row.rows.get("denoiser", 0))
    spent, least = best.rows.get("denoiser", 0), cheap.rows.get("denoiser", 0)
    if best is not cheap and least and spent > 1.05 * least:
        said += f" It took {number(spent / least, 2)} times the denoiser rows of {name(cheap)}, the cheapest."
    return said
