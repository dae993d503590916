"""The gated delta rule over 8 devices of JAX, held to the tolerance rule as on one."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from keraunos import distributed
from tests.distributed.cases import DELTA, EMPTY_DELTA
from tests.linear_attention.cases import GPU

pytestmark = pytest.mark.skipif(len(jax.devices()) < 2, reason="needs several devices")

PLATFORM = None if GPU else "xla"


def over_mesh(case):
    """The outputs and gradients of whole arrays."""
    mesh = jax.make_mesh((len(jax.devices()),), ("tokens",))
    (*floats, cu_seqlens), doutput, dstate = jax.tree.map(jnp.asarray, case.arrays)

    def call(*floats):
        return distributed.gated_delta_rule(*floats, cu_seqlens, **case.options, return_state=True, platform=PLATFORM,
                                            mesh=mesh, spec=P(None, "tokens"))

    @jax.jit
    def both(floats, grads):
        outputs, pull = jax.vjp(call, *floats)
        return *outputs, *pull(grads)

    return [None if x is None else np.asarray(x) for x in both(floats, (doutput, dstate))]


# Each is compiled for seconds: on the CPU some of those that PyTorch runs all.
@pytest.mark.parametrize("case", [*(DELTA if GPU else DELTA[::4]), *EMPTY_DELTA], ids=str)
def test_shards_give_what_the_whole_gives(case):
    case.hold(over_mesh(case))
