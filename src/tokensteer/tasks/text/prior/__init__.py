"""The prior of short texts: its start from published encoders, its training, its classifiers, its quality."""
