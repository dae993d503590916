"""The family of serving's steps on a pool of states."""

from keraunos.kernels.state_pool.contract import OPERATORS
from keraunos.ops.family import PORTABLE, TPU, Family, Operation

STATE_POOL = Family(
    "state_pool",
    tuple(
        Operation(name, name, OPERATORS[name], f"keraunos.serving.pool_operation:{name.upper()}", like="gla")
        for name in ("decode", "verify", "commit")
    ),
    (*PORTABLE, *TPU),
)
