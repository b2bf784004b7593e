"""Metrics of generated images: Fréchet and kernel distances of features, precision and recall, class scores."""
