"""Serving's steps on a pool of states in Triton: passes.py says which kernel runs when, steps.py is the kernel."""
