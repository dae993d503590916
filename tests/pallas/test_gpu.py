"""Values, gradients, transformations and equal bits on a Hopper GPU."""

import functools

import numpy as np
import pytest

import keraunos
from tests.linear_attention.cases import GPU
from tests.pallas.cases import NEEDS_JAX, case, check, jax

pytestmark = [NEEDS_JAX, pytest.mark.skipif(not GPU, reason="needs a GPU: run with --gpu")]


@pytest.fixture(autouse=True)
def _hopper():
    if getattr(jax.devices()[0], "compute_capability", None) != "9.0":
        pytest.skip("needs a Hopper GPU")


def lightning(case, cfg=None):
    """``(query, key, value, initial_state) -> (output, final_state)``."""
    options = dict(log_decay=case.arrays[0].g_gamma, softmax_scale=case.scale, reverse=case.reverse, cfg=cfg)

    def call(query, key, value, state):
        return keraunos.lightning_attention(query, key, value, state, **options, return_state=True, platform="pallas")

    return call


def gradients(case, cfg=None):
    """``(args, doutput, dfinal) -> results`` as :func:`check` wants them."""

    def call(args, doutput, dfinal):
        arrays = [None if x is None else jax.numpy.asarray(x) for x in (*args[:3], args.initial_state)]
        outputs, pull = jax.vjp(lightning(case, cfg), *arrays)
        return *outputs, *pull((jax.numpy.asarray(doutput), jax.numpy.asarray(dfinal)))

    return call


CASES = [
    *(case(T=T, state=True, reverse=T % 2 == 0) for T in (1, 8, 63, 64, 65, 200)),
    *(case(T=150, K=K, V=V, state=True) for K, V in ((64, 64), (64, 128), (128, 64), (128, 128))),
    case(T=150, B=3, H=6, G=2, K=128, V=128, state=True),
    case(T=150, H=4, G=1, dtype="float16", reverse=True),
    case(T=150, scale=-0.3, dstate=False),
    *(case(T=200, K=128, V=128, decay=decay, state=True) for decay in ("zero", "strong", "infinite")),
    # Long enough to be cut into segments.
    *(case(T=3001, H=1, state=True, reverse=reverse, decay=decay) for reverse in (False, True)
      for decay in ("zero", "weak", "infinite")),
    case(T=4096, B=2, H=2, G=1, K=128, V=128, decay="weak", state=True),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case):
    check(case, gradients(case))


def test_an_empty_sequence_keeps_its_state():
    empty = case(T=0, state=True)
    output, state, *_, dstate = gradients(empty)(*empty.arrays)
    assert output.shape == (1, 0, 2, 64)
    np.testing.assert_array_equal(state, empty.arrays[0].initial_state)
    np.testing.assert_array_equal(dstate, empty.arrays[2])


def test_the_same_bits_on_every_run():
    some = case(T=2500, B=2, H=2, K=128, V=128, state=True)
    run = jax.jit(gradients(some))
    first = run(*some.arrays)
    for _ in range(100):
        for a, b in zip(first, run(*some.arrays), strict=True):
            assert np.array_equal(a, b)


def test_what_memory_held_before_does_not_matter():
    # Freed arrays full of NaN are what outputs, states and padding are made in next.
    some = case(T=2501, H=2, state=True)
    want = gradients(some)(*some.arrays)
    for _ in range(3):
        junk = [jax.numpy.full(x.shape, np.nan, x.dtype) for x in want for _ in range(4)]
        jax.block_until_ready(junk)
        del junk
        for a, b in zip(want, gradients(some)(*some.arrays), strict=True):
            assert np.array_equal(a, b)


@functools.cache
def pair():
    made = [case(T=200, H=2, state=True, seed=seed) for seed in (0, 1)]
    arrays = [[jax.numpy.asarray(x) for x in (*c.arrays[0][:3], c.arrays[0].initial_state)] for c in made]
    return lightning(made[0]), arrays


def loss(call, *x):
    output, state = call(*x)
    return (output.astype("float32") ** 2).sum() + (state**2).sum()


def test_jit_checkpoint_and_vmap_give_the_same_bits():
    call, (x, y) = pair()
    grad = jax.grad(functools.partial(loss, call), range(4))
    want = [grad(*x), grad(*y)]
    for other in (jax.jit(grad), jax.grad(functools.partial(loss, jax.checkpoint(call)), range(4))):
        for a, b in zip(want[0], other(*x), strict=True):
            assert np.array_equal(a, b)
    mapped = jax.vmap(grad)(*[jax.numpy.stack(both) for both in zip(x, y, strict=True)])
    for i in (0, 1):
        for a, b in zip(want[i], mapped, strict=True):
            assert np.array_equal(a, b[i])


def test_shard_map():
    call, (x, _) = pair()
    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(call, mesh=mesh, in_specs=(spec("batch"),) * 4, out_specs=(spec("batch"),) * 2)
    for f in (lambda call: call, lambda call: jax.grad(functools.partial(loss, call), range(4))):
        for a, b in zip(f(call)(*x), jax.jit(f(sharded))(*x), strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize("num_stages", [2, 3, 8])
@pytest.mark.parametrize("some", [case(T=700, K=128, V=128, state=True), case(T=700, G=1, state=True)], ids=str)
def test_every_depth_of_the_ring_gives_the_same_bits(some, num_stages):
    cfg = keraunos.LightningAttentionConfig(platform="pallas", num_stages=num_stages)
    for a, b in zip(gradients(some)(*some.arrays), gradients(some, cfg)(*some.arrays), strict=True):
        assert np.array_equal(a, b)
