"""Class-conditional images: CIFAR-10 as tokens of a small autoencoder."""
