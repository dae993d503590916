"""The JAX front end lowers the platform ``cuda`` without a GPU: traced, built for Hopper, put into the graph."""

import functools

import jax
import jax.numpy as jnp
import pytest
import triton
from jax.sharding import PartitionSpec as P
from triton.experimental.gluon._runtime import GluonASTSource

from keraunos.kernels import kernel_registry
from keraunos.kernels.linear_attention.cuda.joins import sum_kernel
from keraunos.kernels.softmax_attention.cuda import passes
from keraunos.kernels.state_pool.contract import Args
from keraunos.ops.invocation import Config
from tests.cuda.compile import HOPPER, source_of
from tests.linear_attention.cases import GPU

pytestmark = pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")

SHAPE = (2, 200, 4, 128)
TOKENS = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)


@pytest.fixture
def gla():
    pytest.importorskip("keraunos.frontends.jax.launch", exc_type=ImportError)
    return functools.partial(kernel_registry.get("gla", "cuda"), cfg=Config(num_stages=3))


def launches(fn, *args):
    """How many kernels the program of a call launches."""
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text().count("triton_kernel_call")


@pytest.mark.parametrize("shape", [SHAPE[:3], SHAPE], ids=["a gate per token", "gates per dimension"])
def test_forward_and_gradients(gla, shape):
    gates = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    gamma, state = jax.ShapeDtypeStruct((4,), jnp.float32), jax.ShapeDtypeStruct((2, 4, 128, 128), jnp.float32)

    def loss(q, k, v, g, gamma, state):
        output, final = gla(q, k, v, g, gamma, initial_state=state)
        return output.astype(jnp.float32).sum() + final.sum()

    # The walk forward, the two of the gradients, the sum of the decays' over the batch; with gates per dimension the
    # walk for queries is launched for strong gates and for others.
    wanted = 5 if len(shape) == 4 else 4
    assert launches(jax.value_and_grad(loss, range(6)), TOKENS, TOKENS, TOKENS, gates, gamma, state) == wanted


@pytest.mark.parametrize(("shape", "H", "wanted"), [(SHAPE[:3], 4, 4), (SHAPE[:3], 2, 4), (SHAPE, 4, 7)],
                         ids=["a gate per token", "shared heads", "per dimension"])
def test_the_delta_rule_and_its_gradients(shape, H, wanted, monkeypatch):
    """With gates per dimension three more are for chunks that are left. Heads that share add up without a launch."""
    launch = pytest.importorskip("keraunos.frontends.jax.launch", exc_type=ImportError)
    monkeypatch.setattr(launch.jax_triton, "triton_call",
                        functools.partial(launch.jax_triton.triton_call, compute_capability=90))
    rule = functools.partial(kernel_registry.get("gated_delta_rule", "cuda"), cfg=Config(num_stages=3))

    def loss(*arrays):
        return rule(*arrays)[0].astype(jnp.float32).sum()

    gates, beta = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in (shape, SHAPE[:3]))
    shared = jax.ShapeDtypeStruct((2, 200, H, 128), jnp.bfloat16)
    assert launches(jax.value_and_grad(loss, range(5)), shared, shared, TOKENS, gates, beta) == wanted


def test_vmap_is_one_launch(gla):
    stacked = jax.ShapeDtypeStruct((3, *SHAPE), jnp.bfloat16)
    assert launches(jax.vmap(lambda *args: gla(*args)[0]), stacked, stacked, stacked) == 1


def test_segments(gla):
    """Pieces' states, segments' starts, the walk over all."""
    long = jax.ShapeDtypeStruct((1, 4096, 4, 128), jnp.bfloat16)
    assert launches(lambda *args: gla(*args)[0], long, long, long) == 3


def test_inside_shard_map(gla):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    part = P(None, None, "x")
    fn = jax.shard_map(lambda *args: gla(*args)[0], mesh=mesh, in_specs=part, out_specs=part)
    assert launches(fn, TOKENS, TOKENS, TOKENS) == 1


@pytest.mark.parametrize(("length", "blocks", "calls", "overwritten"), [
    (200, 4096, 5, 1),
    (4096, 4096, 6, 2),
    (150, 8, 8, 5),  # of another length: JAX keeps its traces
])
def test_softmax_attention(length, blocks, calls, overwritten, monkeypatch):
    """Forward: a counter of tiles where there are many; backward: means, counters, the walk, and what it has summed.

    Kernels overwrite the counters. With few blocks of keys at once half of the heads have a backward of their own, and
    its gradients of queries, keys and values go to those of the other half.
    """
    monkeypatch.setattr(passes, "_ENOUGH_BLOCKS", blocks)
    launch = pytest.importorskip("keraunos.frontends.jax.launch", reason="needs the plugin", exc_type=ImportError)
    # Without a device there is nothing to ask for its capability.
    monkeypatch.setattr(launch.jax_triton, "triton_call",
                        functools.partial(launch.jax_triton.triton_call, compute_capability=90))
    cfg = Config(block_q=128, block_k=128, num_stages=2)
    attention = functools.partial(kernel_registry.get("attention", "cuda"), causal=True, cfg=cfg)
    tokens = jax.ShapeDtypeStruct((2, length, 4, 128), jnp.bfloat16)
    loss = jax.value_and_grad(lambda *args: attention(*args)[0].astype(jnp.float32).sum(), range(3))
    text = jax.jit(loss).trace(tokens, tokens, tokens).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("triton_kernel_call") == calls
    assert text.count("output_operand_alias<") == overwritten


@pytest.mark.parametrize(("length", "count"), [(64, 1), (100_000, 2)])
def test_softmax_attention_of_few_queries(length, count):
    """Parts of the keys, where there are several, and what joins them."""
    pytest.importorskip("keraunos.frontends.jax.launch", reason="needs the plugin", exc_type=ImportError)
    attention = functools.partial(kernel_registry.get("attention", "cuda"), causal=True,
                                  cfg=Config(block_q=64, block_k=64, num_stages=3))
    query, cache = (jax.ShapeDtypeStruct((2, T, H, 128), jnp.bfloat16) for T, H in ((1, 8), (length, 2)))
    offsets = jax.ShapeDtypeStruct((2,), jnp.int32)
    call = lambda q, k, v, offsets: attention(q, k, v, query_offset=offsets)[0]  # noqa: E731
    assert launches(call, query, cache, cache, offsets) == count


@pytest.mark.parametrize(("op_id", "has_initial", "calls", "place"), [
    ("prefill", False, 1, 3), ("prefill", True, 1, 3), ("delta_prefill", True, 2, 7),
])
def test_prefill_overwrites_its_pool(op_id, has_initial, calls, place):
    """The second result of the last launch is where an array of the kernel is, of those that are given."""
    pytest.importorskip("keraunos.frontends.jax.launch", exc_type=ImportError)
    prefill = functools.partial(kernel_registry.get(op_id, "cuda"), cfg=Config(num_stages=3))
    tokens, slots = jax.ShapeDtypeStruct((200, 4, 128), jnp.bfloat16), jax.ShapeDtypeStruct((3,), jnp.int32)
    states, offsets = jax.ShapeDtypeStruct((8, 4, 128, 128), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)
    given = Args(tokens, tokens, tokens, slots=slots, cu_seqlens=offsets,
                 beta=jax.ShapeDtypeStruct((200, 4), jnp.bfloat16) if calls > 1 else None,
                 has_initial=jax.ShapeDtypeStruct((3,), jnp.bool_) if has_initial else None)
    step = jax.jit(lambda states, rest: prefill(*rest._replace(states=states)), donate_argnums=0)
    text = step.trace(states, given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("triton_kernel_call") == calls
    assert f"output_operand_alias<output_tuple_indices = [1], operand_index = {place}," in text


def test_a_build_is_as_triton_makes_it_and_is_kept(gla, tmp_path, monkeypatch):
    gluon = pytest.importorskip("keraunos.frontends.jax.gluon")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    constants = {"D": 1, "BR": 4, "BO": 128}
    types = {"x": "*fp32", "M": "i32", "R": "i32", "y": "*fp32"}
    made = gluon._built.__wrapped__(sum_kernel, tuple(types.items()), tuple(constants.items()), 4)
    wanted = triton.compile(source_of(sum_kernel, types, constants), target=HOPPER)
    names = ("num_warps", "shared", "global_scratch_size")
    assert made == (wanted.asm["ptx"], *(getattr(wanted.metadata, name) for name in names))
    monkeypatch.setattr(GluonASTSource, "make_ir", None)
    assert gluon._built.__wrapped__(sum_kernel, tuple(types.items()), tuple(constants.items()), 4) == made
