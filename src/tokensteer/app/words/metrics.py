"""Metrics in tables: their titles, the order and choice of columns, and which direction is better."""

from __future__ import annotations

from collections.abc import Iterable

HIGHER = frozenset({"accuracy", "best", "3-mer correlation", "motif correlation"})
"""Metrics of which more is better. ESS and diversity have no better direction: the unsteered model has most of both."""
BIASED = frozenset({"reward", "reward accuracy", "activity"})
"""Metrics of the reward itself, of which none is best: a biased method can have more than the target."""
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


DEFINED = {
    "accuracy": "share of samples, by weight, that a network that the reward does not use assigns to the goal",
    "reward accuracy": "the same by the network of the reward; a biased method can exceed the target",
    "reward": "mean reward of posterior draws; a biased method can exceed the target",
    "activity": "median logit of the network of the reward; a biased method can exceed the target",
    "diversity": "how much draws of different populations differ: the share of sites, for binary images over that of "
    "real ones; for colour images the mean distance of pixels, of 1",
    "class log p": "log-probability of the class under the network of the reward",
    "ess": "effective sample size at the end over N: 1 if all weights are equal",
    "emd": "earth mover's distance to the exact target, in cells of the grid",
    "tv": "total variation distance to the exact target, from 0 to 1",
    "tv/iid": "TV over that of as many exact draws: 1 is perfect",
    "tv/iid(ESS)": "TV over that of ESS exact draws",
    "kl": "Kullback-Leibler divergence from the exact target, in nats",
    "kl/iid": "the divergence over that of as many exact draws: 1 is perfect",
    "perplexity": "perplexity of draws under another language model",
    "distinct-1": "share of distinct words among the draws of a prompt",
    "distinct-2": "share of distinct word pairs among the draws of a prompt",
    "distinct-3": "share of distinct word triples among the draws of a prompt",
    "self-BLEU": "how much the draws of a prompt repeat each other",
    "3-mer correlation": "correlation of 3-mer counts with those of the most active real sequences",
    "motif correlation": "correlation of motif counts with those of the most active real sequences",
    "log-likelihood": "median bound on the model's log-probability of a draw, in nats",
    "distinct 6-mers": "share of distinct 6-mers among the draws",
    "MPRA": "activity that a published network predicts for the draws",
    "log Z": "log of the mean estimate of the normaliser Z = E[exp(r/kl)] under the model",
    "rows": "sequences that a network computed",
    "seconds": "wall-clock time of the whole row, planning included",
}
"""Each column of a report in a line."""
