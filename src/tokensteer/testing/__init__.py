"""Exact answers for small models, and laws for your own denoisers, kernels, proposals, rewards and resamplers."""

from tokensteer.testing.assertions import (
    assert_denoiser,
    assert_kernel,
    assert_proposal,
    assert_resampler,
    assert_reward,
)
from tokensteer.testing.exact import Enumeration, Moves, Score, TableDenoiser, all_sequences, enumerate_steering, score
from tokensteer.testing.jump_paths import JumpPaths, balance_log_weight, jump_paths, reversed_rate, tilt_log_weight

__all__ = [
    "Enumeration",
    "JumpPaths",
    "Moves",
    "Score",
    "TableDenoiser",
    "all_sequences",
    "assert_denoiser",
    "assert_kernel",
    "assert_proposal",
    "assert_resampler",
    "assert_reward",
    "balance_log_weight",
    "enumerate_steering",
    "jump_paths",
    "reversed_rate",
    "score",
    "tilt_log_weight",
]
