"""The JAX front end lowers the Triton kernels for CUDA without a GPU: traced, built for sm_90, put into the graph."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from keraunos.kernels.registry import kernel_registry
from keraunos.ops import Config
from tests.linear_attention.cases import GPU

pytestmark = pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")

CFG = Config(block_q=64, block_d=64, num_warps=4, num_stages=2)
SHAPE = (2, 200, 4, 64)
ALLOWED = [jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call")]


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
    """The shapes of the results, and the program."""
    traced = jax.jit(f).trace(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "triton_kernel_call" in text
    return [x.shape for x in jax.tree.leaves(traced.out_info)], text


def launches(text):
    """The number of launches; there is no loop around them."""
    assert "stablehlo.while" not in text
    return text.count("@triton_kernel_call")


def test_forward(gla):
    assert lowered(gla, *[SHAPE] * 4)[0] == [SHAPE, (2, 4, 64, 64)]


@pytest.mark.parametrize("transform", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_gradients(gla, transform):
    assert lowered(gradients(transform(gla)), *[SHAPE] * 4)[0] == [SHAPE] * 4


@pytest.mark.parametrize(("axes", "shapes"), [
    ((0, 0, 0, 0), [(3, *SHAPE)] * 4), ((0, None, None, None), [(3, *SHAPE), *[SHAPE] * 3]),
    ((1, 0, None, 2), [(2, 3, *SHAPE[1:]), (3, *SHAPE), SHAPE, (*SHAPE[:2], 3, *SHAPE[2:])]),
])  # fmt: skip
def test_vmap_launches_once(gla, axes, shapes):
    """Folded into the batch: as many launches as without vmap, forward and backward."""
    for f, results in ((gla, [(3, *SHAPE), (3, 2, 4, 64, 64)]), (gradients(gla), [(3, *SHAPE)] * 4)):
        found, text = lowered(jax.vmap(f, axes), *shapes)
        assert found == results
        assert launches(text) == launches(lowered(f, *[SHAPE] * 4)[1])


def test_vmap_of_packed_sequences(gla):
    def packed(q, cu):
        return gla(q, q, q, q, cu_seqlens=cu.astype(jnp.int32))

    found, text = lowered(jax.vmap(packed), (3, 1, 200, 4, 64), (3, 5))
    assert found == [(3, 1, 200, 4, 64), (3, 4, 4, 64, 64)]
    assert launches(text) == launches(lowered(packed, (1, 200, 4, 64), (5,))[1])


def test_shard_map(gla):
    mesh = jax.make_mesh((2, 4), ("batch", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = P("batch", None, "heads")
    sharded = jax.shard_map(gla, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec, P("batch", "heads")))
    assert lowered(gradients(sharded), *[SHAPE] * 4)[0] == [SHAPE] * 4


def test_export(gla):
    exported = jax.export.export(jax.jit(gla), platforms=["cuda"], disabled_checks=ALLOWED)(
        *[jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)] * 4
    )
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",)
    assert [x.shape for x in again.out_avals] == [SHAPE, (2, 4, 64, 64)]
    assert "triton_kernel_call" in again.mlir_module()
    with pytest.raises(ValueError, match="triton_kernel_call"):
        jax.export.export(jax.jit(gla), platforms=["cuda"])(*[jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)] * 4)


def test_export_of_gradients(gla):
    exported = jax.export.export(jax.jit(gradients(gla)), platforms=["cuda"], disabled_checks=ALLOWED)(
        *[jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)] * 4
    )
    assert [x.shape for x in jax.export.deserialize(exported.serialize()).out_avals] == [SHAPE] * 4
