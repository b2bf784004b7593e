"""Text to image: colour emoji in six styles as tokens of a small autoencoder, drawn from a caption."""
