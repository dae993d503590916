"""The serving functions in Gluon for Hopper GPUs: prefill, for JAX and PyTorch."""
