"""The prompts that texts begin with unless others are given."""

from __future__ import annotations

DEFAULT = (
    "Once upon a time",
    "The book",
    "The chicken",
    "The city",
    "The country",
    "The horse",
    "The lake",
    "The last time",
    "The movie",
    "The painting",
    "The pizza",
    "The potato",
    "The president of the country",
    "The road",
    "The year is 1910",
)
"""The prompts of the paper."""

CHOOSING = (
    "The house",
    "The restaurant",
    "The teacher",
    "My brother",
    "In the morning",
    "The garden",
    "The train",
    "The phone",
    "When we arrived",
    "The song",
    "The dog",
    "The river",
    "The coat",
    "My neighbor",
    "The hotel",
)
"""Other prompts, on which settings are chosen."""
