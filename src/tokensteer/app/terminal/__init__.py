"""Tables and progress bars in a terminal."""
