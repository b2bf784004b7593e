"""Names, numbers and metrics as text."""
