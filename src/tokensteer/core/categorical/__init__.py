"""Categorical distributions over a vocabulary, in the form a network returned them.

All code that exists for speed over the vocabulary is here: fused draws, low-rank gradients, Triton kernels."""
