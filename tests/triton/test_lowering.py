"""The JAX front end lowers the Triton kernels for CUDA without a GPU: traced, built for sm_90, put into the graph."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from keraunos.kernels.registry import kernel_registry
from keraunos.ops import Config
from tests.linear_attention.cases import GPU

pytestmark = pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")

CFG = Config(block_q=64, block_d=64, num_warps=4, num_stages=2)
SHAPE = (2, 200, 4, 64)


@pytest.fixture
def gla(monkeypatch):
    jax_triton = pytest.importorskip("jax_triton", reason="needs jax-cuda13-plugin", exc_type=ImportError)
    # Without a device there is nothing to ask for its capability.
    call = functools.partial(jax_triton.triton_call, compute_capability=90)
    monkeypatch.setattr(jax_triton, "triton_call", call)
    return functools.partial(kernel_registry.get("gla", "triton").fn, cfg=CFG)


def gradients(f):
    def loss(*x):
        output, state = f(*x)
        return output.astype(jnp.float32).sum() + state.sum()

    return jax.grad(loss, range(4))


def lowered(f, *shapes):
    traced = jax.jit(f).trace(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "triton_kernel_call" in text
    return [x.shape for x in jax.tree.leaves(traced.out_info)]


def test_forward(gla):
    assert lowered(gla, *[SHAPE] * 4) == [SHAPE, (2, 4, 64, 64)]


@pytest.mark.parametrize("transform", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_gradients(gla, transform):
    assert lowered(gradients(transform(gla)), *[SHAPE] * 4) == [SHAPE] * 4


def test_vmap(gla):
    assert lowered(jax.vmap(gradients(gla)), *[(3, *SHAPE)] * 4) == [(3, *SHAPE)] * 4
    one = jax.vmap(gla, (0, None, None, None))
    assert lowered(one, (3, *SHAPE), *[SHAPE] * 3) == [(3, *SHAPE), (3, 2, 4, 64, 64)]


def test_shard_map(gla):
    mesh = jax.make_mesh((2, 4), ("batch", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = P("batch", None, "heads")
    sharded = jax.shard_map(gla, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec, P("batch", "heads")))
    assert lowered(gradients(sharded), *[SHAPE] * 4) == [SHAPE] * 4
