"""Units of work, and the processes and machines that run them."""
