"""A product of two densities on a grid, with its exact answers."""
