"""Rows by name, and what is said of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tokensteer.app.report.folder import Row
from tokensteer.app.words.numbers import number, spread
from tokensteer.tasks.common.metrics import Measured

UNBROKEN = "\u00a0=\u00a0"
HIGHER = frozenset(
    {"accuracy", "reward accuracy", "best", "reward", "activity", "3-mer correlation", "motif correlation"}
)
LOWER = frozenset({"emd", "nll", "perplexity", "error"})
COLOURS = 12
"""How many colours there are beside grey."""
OF_MANY = frozenset({"ess", "diversity", "distinct-1", "distinct-2", "distinct-3", "self-BLEU"})
"""Metrics that say nothing of a single particle."""
ELSEWHERE = frozenset({"log_z", "exact log_z"})
"""Metrics that the column log Z and its note say already. ESS and diversity have no best: the unsteered model leads."""


def plural(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def heading(metric: str) -> str:
    """The metric as a heading."""
    return {"emd": "EMD", "ess": "ESS/N", "nll": "NLL"}.get(metric, metric)


def naming(rows: Sequence[Row]) -> Callable[[Row], str]:
    """A name for each row that says no more than what tells it from the others."""
    sizes, seeds = {row.particles for row in rows}, {row.seed for row in rows}

    def name(row: Row) -> str:
        size = f", N = {row.particles}" if len(sizes) > 1 else ""
        seed = f", seed {row.seed}" if len(seeds) > 1 else ""
        return f"{row.method}{size}{seed}".replace(" = ", UNBROKEN)

    return name


def colours_of(rows: Sequence[Row]) -> dict[str, int]:
    """A colour for each method: grey for the model alone, then one after the other. If they are too many, variants that
    end in the same words share one."""
    methods = {row.method: row for row in rows if row.method != "pretrained"}
    crowded = len(methods) > COLOURS
    words = {method: row.variant[-1] if crowded and row.variant else method for method, row in methods.items()}
    places = list(dict.fromkeys(words.values()))
    return {"pretrained": 0, **{method: 1 + places.index(words[method]) % COLOURS for method in methods}}


Look = Callable[[Row], Mapping[str, Measured]]
"""The metrics of a row that are meant: those of its answer, or of its best by reward."""


def of_answer(row: Row) -> Mapping[str, Measured]:
    return row.metrics


def of_best(row: Row) -> Mapping[str, Measured]:
    return row.best


def leaders(rows: Sequence[Row], metric: str, look: Look = of_answer) -> tuple[Row | None, list[Row]]:
    """The best row by a metric, and those that two standard errors do not tell from it."""
    known = [row for row in rows if metric in look(row) and math.isfinite(look(row)[metric].mean)]
    sign = 1.0 if metric in HIGHER else -1.0
    if len(known) < 2 or metric not in HIGHER | LOWER:
        return None, []
    best = max(known, key=lambda row: sign * look(row)[metric].mean)
    top = look(best)[metric]

    def level(row: Row) -> bool:
        here = look(row)[metric]
        errors = [e for e in (here.error, top.error) if math.isfinite(e)]
        return abs(top.mean - here.mean) <= 2.0 * math.hypot(*errors)

    return best, [row for row in known if row is not best and level(row)]


def metrics_of(rows: Sequence[Row], look: Look = of_answer) -> list[str]:
    """All metrics of some rows, in their order."""
    named = dict.fromkeys(name for row in rows for name in look(row))
    left_out = ELSEWHERE if look is of_answer else ELSEWHERE | OF_MANY
    return [name for name in named if name not in left_out]


def verdict(rows: Sequence[Row]) -> str:
    """What the table says, in a sentence or two."""
    name = naming(rows)
    main = next((metric for metric in metrics_of(rows) if metric in HIGHER | LOWER), None)
    if main is None:
        return f"{plural(len(rows), 'run')} finished."
    if len(rows) == 1:
        mean, error = spread(rows[0].metrics[main])
        return f"{name(rows[0])} reached {heading(main)} {mean}{error and f' ± {error}'}."
    best, level = leaders(rows, main)
    if best is None:
        return f"{plural(len(rows), 'run')} finished."
    mean, error = spread(best.metrics[main])
    side = "highest" if main in HIGHER else "lowest"
    said = f"{name(best)} has the {side} {heading(main)}, {mean}{error and f' ± {error}'}"
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
