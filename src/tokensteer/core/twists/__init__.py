"""Tilts, estimators of the reward at x_t, potentials, ramps, learned twists, gradients of estimates."""
