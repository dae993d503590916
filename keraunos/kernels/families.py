"""All families of operations. A new one is a folder with a ``family.py``, and a line here."""

from keraunos.kernels.gated_delta_rule.family import GATED_DELTA_RULE
from keraunos.kernels.linear_attention.family import LINEAR_ATTENTION
from keraunos.kernels.softmax_attention.family import SOFTMAX_ATTENTION
from keraunos.kernels.state_pool.family import STATE_POOL
from keraunos.ops.registry import kernel_registry

FAMILIES = (LINEAR_ATTENTION, GATED_DELTA_RULE, SOFTMAX_ATTENTION, STATE_POOL)

for _family in FAMILIES:
    kernel_registry.add(_family)
