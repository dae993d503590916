"""Linear attention over 8 devices of JAX, held to the tolerance rule as on one."""

import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from keraunos import distributed
from tests.distributed.cases import CASES, EMPTY
from tests.linear_attention.cases import GPU, Case, run_jax

pytestmark = pytest.mark.skipif(len(jax.devices()) < 2, reason="needs several devices")

PLATFORM = None if GPU else "xla"


def options(case):
    return dict(softmax_scale=case.scale, reverse=case.reverse, return_state=True, platform=PLATFORM)


@functools.partial(jax.jit, static_argnums=(1, 2))
def over_mesh(args, case, platform):
    """Whole arrays."""
    mesh = jax.make_mesh((len(jax.devices()),), ("tokens",))
    return distributed.gla_attention(*args, mesh=mesh, spec=P(None, "tokens"), **options(case))


# Each is compiled for seconds: on the CPU some of those that PyTorch runs all.
@pytest.mark.parametrize("case", [*(CASES if GPU else [CASES[3], *CASES[5:8]]), *EMPTY], ids=str)
def test_shards_give_what_the_whole_gives(case):
    case.check(functools.partial(run_jax, PLATFORM, over_mesh))


def test_axes_of_one_name():
    """Of two meshes, one after the other, with shards of one shape."""
    for size in (1, 2):
        mesh = jax.make_mesh((size,), ("axis",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:size])

        @functools.partial(jax.jit, static_argnums=(1, 2))
        def call(args, case, platform, mesh=mesh):
            return distributed.gla_attention(*args, mesh=mesh, spec=P(None, "axis"), **options(case))

        Case(gamma=1, T=16 * size, state=True).check(functools.partial(run_jax, PLATFORM, call), gradients=False)


@functools.partial(jax.jit, static_argnums=(1, 2))
def over_three_axes(args, case, platform):
    """Lightning attention, its batch and heads sharded, too; with the types that say what varies over which axis."""
    q, k, v, _, log_decay, state, _ = args
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.make_mesh((2, 2, 2), ("data", "tokens", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    tokens, states = P("data", "tokens", "heads"), P("data", "heads")

    @jax.shard_map(mesh=mesh, in_specs=(*[tokens] * 3, states, P("heads")), out_specs=(tokens, states))
    def call(q, k, v, state, log_decay):
        return distributed.lightning_attention(q, k, v, state, log_decay=log_decay, axis_name="tokens", **options(case))

    return call(q, k, v, state, log_decay)


def test_three_axes():
    case = Case(gamma=1, T=40, H=4, G=2, state=True)
    case.check(functools.partial(run_jax, PLATFORM, over_three_axes))


def test_copies_are_gathered_as_one_is():
    from keraunos.distributed.jax import shards as jax_shards

    mesh = jax.make_mesh((len(jax.devices()),), ("tokens",), (jax.sharding.AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("tokens"), out_specs=P("tokens"))
    def both(x):
        shards = jax_shards.shards("gla", "tokens")
        assert shards.copies == shards.size
        copied = shards.gather(jax.numpy.tile(x, (shards.copies, 1)), right=True)
        return jax.numpy.stack([copied, shards.gather(x, right=True)])[None]

    x = np.arange(3 * len(jax.devices()), dtype=np.float32)
    for copied, gathered in np.asarray(jax.jit(both)(x)):
        np.testing.assert_array_equal(copied, x.reshape(-1, 3))
        np.testing.assert_array_equal(gathered, copied)


def test_the_volume_does_not_grow_with_the_tokens():
    """The exchanges of the compiled program."""
    mesh = jax.make_mesh((len(jax.devices()),), ("tokens",))
    found = []
    for T in (64, 512):
        x = jax.ShapeDtypeStruct((1, T, 2, 16), np.float32)
        call = functools.partial(distributed.lightning_attention, layer_idx=0, num_layers=2, mesh=mesh,
                                 spec=P(None, "tokens"), platform=PLATFORM)

        def loss(q, k, v, call=call):
            return call(q, k, v).sum()

        text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile().as_text()
        exchanges = r"= (.+?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
        # Of one that is only started the type has what goes in, too, and first.
        found.append(sorted(re.findall(r"\w+\[[\d,]*\]", kind)[-1] for kind in re.findall(exchanges, text)))
    # A state and its decay per head: forward, and backward.
    assert found[0] == found[1]
    assert found[0] == [f"f32[{len(jax.devices())},{2 * (16 * 16 + 1)}]"] * 2


def test_the_axis_is_needed():
    x = np.ones((1, 8, 2, 16), np.float32)
    call = distributed.lightning_attention
    for options, words in (({}, "expected axis_name="), ({"axis_name": "tokens"}, "no axis of a shard_map"),
                           ({"mesh": jax.make_mesh((2,), ("tokens",))}, "spec is None")):
        with pytest.raises(ValueError, match=words):
            call(*[jax.numpy.asarray(x)] * 3, layer_idx=0, num_layers=2, **options)
