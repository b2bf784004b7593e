"""Rewards by field. Here: constraints on the canvas, as finite automata over tokens, and sums and products of rewards;
text is in `rewards.text`, DNA in `rewards.dna`."""

from tokensteer.rewards.combine import log_product, product, weighted
from tokensteer.rewards.constraints.automaton import (
    Automaton,
    avoids,
    both,
    contains,
    count,
    either,
    fixed,
    minimal,
    negate,
)
from tokensteer.rewards.constraints.lookahead import (
    Conditioned,
    Constrained,
    Kept,
    LookAhead,
    Satisfies,
    constrain,
    kept,
)
from tokensteer.rewards.constraints.regex import regex

__all__ = [
    "Automaton",
    "Conditioned",
    "Constrained",
    "Kept",
    "LookAhead",
    "Satisfies",
    "avoids",
    "both",
    "constrain",
    "contains",
    "count",
    "either",
    "fixed",
    "kept",
    "log_product",
    "minimal",
    "negate",
    "product",
    "regex",
    "weighted",
]
