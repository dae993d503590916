"""Linear attention in Triton, for GPUs from sm_80: passes.py says which kernel runs when, the others are kernels."""
