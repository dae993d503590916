"""Sequences shared by JAX's devices: what each does with its shard, and how devices exchange states."""
