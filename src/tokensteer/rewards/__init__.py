"""Rewards by field. Here: constraints on the canvas, as finite automata over tokens."""

from tokensteer.rewards.automaton import Automaton, avoids, both, contains, count, either, fixed, minimal, negate, regex
from tokensteer.rewards.constraints import Conditioned, Constrained, Kept, LookAhead, Satisfies, constrain, kept

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
    "minimal",
    "negate",
    "regex",
]
