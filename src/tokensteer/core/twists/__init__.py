"""Twists: rewards, estimators of the reward at x_t, potentials, ramps, gradients of estimates."""
