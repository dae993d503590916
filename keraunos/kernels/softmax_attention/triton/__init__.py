"""Softmax attention in Triton: passes.py says which kernel runs when, the others are the kernels."""
