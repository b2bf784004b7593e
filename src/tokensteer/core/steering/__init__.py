"""Steering: a model, a twist and a proposal as one Feynman-Kac path; named methods, the planner, CUDA graphs."""
