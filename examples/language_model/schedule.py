"""The learning rate, and the unit of losses."""

import math

NATS_PER_BIT = math.log(2)
_WARM_UP = 0.03


def learning_rate(progress: float, highest: float) -> float:
    """A short warm-up, then half a cosine down to zero at the end of the budget, which may be a time."""
    return highest * min(1.0, 0.01 + progress / _WARM_UP) * 0.5 * (1 + math.cos(math.pi * progress))
