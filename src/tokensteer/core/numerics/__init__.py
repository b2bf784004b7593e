"""Numerics: random draws, tables of rows, batching, checks of numbers. Imports no other room."""
