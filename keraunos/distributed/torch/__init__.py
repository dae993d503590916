"""Sequences shared by PyTorch's ranks: what each does with its shard, and how ranks exchange states."""
