"""The gated linear recurrence in Gluon, scheduled by hand for Hopper GPUs, for JAX and PyTorch."""
