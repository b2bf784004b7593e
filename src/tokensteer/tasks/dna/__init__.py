"""Regulatory DNA of 200 base pairs (`dna`) and words of eight letters (`tfbind`)."""
