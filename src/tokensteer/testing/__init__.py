"""Exact answers for small models, and laws for your own denoisers, kernels, proposals, rewards and resamplers."""

from tokensteer.testing.assertions import (
    assert_denoiser,
    assert_kernel,
    assert_proposal,
    assert_resampler,
    assert_reward,
)
from tokensteer.testing.exact import Enumeration, Moves, Score, TableDenoiser, all_sequences, enumerate_steering, score

__all__ = [
    "Enumeration",
    "Moves",
    "Score",
    "TableDenoiser",
    "all_sequences",
    "assert_denoiser",
    "assert_kernel",
    "assert_proposal",
    "assert_resampler",
    "assert_reward",
    "enumerate_steering",
    "score",
]
