"""The exact core: measures, schedules, resampling, kernels, the particle loop, models, twists, proposals, steering."""
