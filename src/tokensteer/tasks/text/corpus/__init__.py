"""A corpus that a language model writes: prompts, the model, its sampler, cleaning, and windows for training."""
