"""Proposals q(x_s | x_t): the model, guidance, gradients, learned networks, enumeration."""
