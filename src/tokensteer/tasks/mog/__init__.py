"""A mixture of Gaussians on a grid, with its exact answers."""
