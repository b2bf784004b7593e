"""The SMC loop, Feynman-Kac paths, resampling, triggers, results, particle Gibbs; nothing about tokens or diffusion."""
