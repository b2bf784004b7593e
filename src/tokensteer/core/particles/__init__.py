"""Particles: the Feynman-Kac path, the SMC loop, resampling, triggers, results, particle Gibbs.

This room knows nothing of tokens or diffusion and imports `numerics` only."""
