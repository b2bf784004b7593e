"""Kernels p(x_s | x_t): schedules, measures on sequences, and every reverse process."""
