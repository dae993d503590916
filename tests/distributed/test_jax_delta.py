"""The gated delta rule over 8 devices of JAX, held to the tolerance rule as on one."""


import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from keraunos import distributed
from tests.distributed.cases import DELTA, EMPTY_DELTA
from tests.gated_delta_rule.cases import Case
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


# Each is compiled for seconds: on the CPU some of those that PyTorch runs all. One with gates per dimension is below.
@pytest.mark.parametrize("case", [*(DELTA if GPU else [DELTA[0], *DELTA[7:9]]), *EMPTY_DELTA], ids=str)
def test_shards_give_what_the_whole_gives(case):
    case.hold(over_mesh(case))


def test_each_device_sends_a_state_and_a_matrix():
    """Read from the compiled program: forward and backward."""
    mesh = jax.make_mesh((len(jax.devices()),), ("tokens",))
    x = jax.ShapeDtypeStruct((1, 64, 2, 16), np.float32)

    def loss(q, k, v):
        return distributed.gated_delta_rule(q, k, v, mesh=mesh, spec=P(None, "tokens"), platform=PLATFORM).sum()

    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile().as_text()
    exchanges = r"= (.+?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    # Of one that is only started the type has what goes in, too, and first.
    found = [re.findall(r"\w+\[[\d,]*\]", kind)[-1] for kind in re.findall(exchanges, text)]
    assert found == [f"f32[{len(jax.devices())},{2 * (16 * 16 + 16 * 16)}]"] * 2


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
def test_three_axes():
    """Batch and heads are sharded, too; with the types that say what varies over which axis."""
    case = Case(T=40, H=4, G=2, gate="vector", beta=2.0, norm=True, state=True)
    mesh = jax.make_mesh((2, 2, 2), ("data", "tokens", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    tokens, states = P("data", "tokens", "heads"), P("data", "heads")
    (*floats, _), doutput, dstate = jax.tree.map(jnp.asarray, case.arrays)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(*[tokens] * 5, states), out_specs=(tokens, states))
    def call(*floats):
        return distributed.gated_delta_rule(*floats, axis_name="tokens", **case.options, return_state=True,
                                            platform=PLATFORM)

    @jax.jit
    def both(floats, grads):
        outputs, pull = jax.vjp(call, *floats)
        return *outputs, *pull(grads)

    case.hold([*map(np.asarray, both(floats, (doutput, dstate)))])
