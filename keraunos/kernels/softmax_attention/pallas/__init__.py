"""Softmax attention on TPUs, by the kernels that JAX ships for them."""
