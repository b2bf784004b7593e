"""Runs: what is to be run, how it is run, and the folder it leaves."""
