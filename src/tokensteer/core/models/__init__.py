"""Models: denoisers, their validation, predictions, `Diffusion`, `Product`, templates."""
