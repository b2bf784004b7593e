"""Planning jobs, running them, and the run folders that they write."""
