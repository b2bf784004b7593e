"""Exact answers for small models, and laws for your own denoisers, kernels, proposals and rewards."""

from tokensteer.testing.exact import (
    Enumeration,
    Moves,
    Score,
    TableDenoiser,
    all_sequences,
    enumerate_steering,
    score,
)

__all__ = [
    "Enumeration",
    "Moves",
    "Score",
    "TableDenoiser",
    "all_sequences",
    "enumerate_steering",
    "score",
]
