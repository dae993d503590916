"""The gated linear recurrence: lightning attention and gated linear attention."""
