"""What all tasks share: the `Task` type, metrics, training, learned proposals, PNG files."""
