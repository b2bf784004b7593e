"""Metrics in tables: their titles, the order and choice of columns, and which direction is better."""

from __future__ import annotations

from collections.abc import Iterable

HIGHER = frozenset(
    {"accuracy", "reward accuracy", "best", "reward", "activity", "3-mer correlation", "motif correlation"}
)
"""Metrics of which more is better. ESS and diversity have no better direction: the unsteered model has most of both."""
LOWER = frozenset({"emd", "tv", "nll", "perplexity", "error"})  # metrics of which less is better
ELSEWHERE = frozenset({"log_z", "exact log_z"})
"""Metrics without a column of their own: the column log Z and the text beside the table show them."""
OF_MANY = frozenset({"ess", "diversity", "distinct-1", "distinct-2", "distinct-3", "self-BLEU"})
"""Metrics that are meaningless for a single particle, the best of its population."""


def title(metric: str) -> str:
    named = {"emd": "EMD", "emd floor": "EMD floor", "tv": "TV", "tv floor": "TV floor", "ess": "ESS/N", "nll": "NLL"}
    return named.get(metric, metric)


def columns(measured: Iterable[Iterable[str]], of_best: bool = False) -> list[str]:
    """The metrics that get a column, in order of first appearance. `measured` has the metrics of each row, and with
    `of_best` they are those of the best particles by reward."""
    left_out = ELSEWHERE | OF_MANY if of_best else ELSEWHERE
    return [name for name in dict.fromkeys(name for names in measured for name in names) if name not in left_out]
