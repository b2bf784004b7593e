"""What a person runs: the only layer that prints."""
