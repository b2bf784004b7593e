"""Exact answers for small models, and assertions for your own denoisers, kernels, proposals, rewards and resamplers."""

from tokensteer.testing.assertions import assert_denoiser as assert_denoiser
from tokensteer.testing.assertions import assert_resampler as assert_resampler
from tokensteer.testing.assertions import assert_reward as assert_reward
from tokensteer.testing.exact import Enumeration as Enumeration
from tokensteer.testing.exact import Moves as Moves
from tokensteer.testing.exact import Score as Score
from tokensteer.testing.exact import TableDenoiser as TableDenoiser
from tokensteer.testing.exact import all_sequences as all_sequences
from tokensteer.testing.exact import enumerate_steering as enumerate_steering
from tokensteer.testing.exact import score as score
from tokensteer.testing.jump_paths import JumpPaths as JumpPaths
from tokensteer.testing.jump_paths import balance_log_weight as balance_log_weight
from tokensteer.testing.jump_paths import jump_paths as jump_paths
from tokensteer.testing.jump_paths import reversed_rate as reversed_rate
from tokensteer.testing.jump_paths import tilt_log_weight as tilt_log_weight
from tokensteer.testing.measures import assert_kernel as assert_kernel
from tokensteer.testing.measures import assert_proposal as assert_proposal
