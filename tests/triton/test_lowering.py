"""The JAX front end lowers the Triton kernels for CUDA without a GPU: traced, built for sm_90, put into the graph."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from keraunos.kernels import kernel_registry
from keraunos.ops import Config
from tests.linear_attention.cases import GPU
from tests.triton.lowering import build_each_once, on_hopper

pytestmark = pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")

CFG = Config(block_q=32, block_d=16, num_warps=4, num_stages=2)
SHAPE = (2, 200, 4, 16)
ALLOWED = [jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call")]


@pytest.fixture
def launch(monkeypatch):
    return on_hopper(monkeypatch)


@pytest.fixture
def triton(launch, monkeypatch):
    """The low-level functions of the platform, by name."""
    build_each_once(launch, monkeypatch)
    return lambda name, cfg: functools.partial(kernel_registry.get(name, "triton"), cfg=cfg)


@pytest.fixture
def gla(triton):
    return triton("gla", CFG)


@pytest.fixture
def attention(triton):
    """Causal, with all the options that go together: ``(query, key, value, sinks or bias) -> output``."""
    run = triton("attention", Config(block_q=32, block_k=32, num_warps=4, num_stages=2))

    def call(q, k, v, extra=None):
        ids = jnp.zeros(q.shape[:2], jnp.int32)
        if extra is None or extra.ndim == 2:
            options = dict(sinks=extra, query_segments=ids, key_segments=ids, soft_cap=20.0, window=(100, 7))
        else:
            options = dict(bias=extra, dropout=0.1, seed=jnp.zeros(2, jnp.uint32))
        return run(q, k, v, causal=True, **options)[0]

    return call


@pytest.fixture
def shared(launch, monkeypatch):
    """``capability ->`` the bytes of shared memory of what is launched on such a GPU, asked for with eight stages."""
    from tests.triton.product import product_kernel

    library = launch.triton_lib.triton_kernel_call_lib
    x, made, found = jax.ShapeDtypeStruct((5, 64, 64), jnp.bfloat16), library.TritonKernel, []

    def kernel(name, num_warps, num_ctas, bytes, *rest):
        found.append(bytes)
        return made(name, num_warps, num_ctas, bytes, *rest)

    def call(capability):
        on_gpu = functools.partial(launch.jax_triton.triton_call.func, compute_capability=capability)
        monkeypatch.setattr(library, "TritonKernel", kernel)
        monkeypatch.setattr(launch.jax_triton, "triton_call", on_gpu)

        def run(x):
            inputs, outputs = dict(x=x, n=4), dict(y=((64, 64), "float32"))
            return launch.launch(product_kernel, (1,), inputs, outputs, dict(BLOCK=64), num_warps=4, num_stages=8)

        jax.jit(run).trace(x).lower(lowering_platforms=("cuda",))
        return found.pop()

    monkeypatch.setattr(product_kernel, "__module__", "keraunos.product")
    return call


def test_stages_that_do_not_fit_are_left_out(shared):
    """Seven stages are on their way, of 16 KB each: one too many where a program has 99 KB."""
    assert shared(80) == 7 * 16384
    assert shared(89) == shared(120) == 6 * 16384


def test_what_fits_with_no_number_of_stages_is_refused(launch, shared, monkeypatch):
    monkeypatch.setattr(launch, "shared_memory", {"8.6": 1000}.get)
    with pytest.raises(ValueError, match=r"product_kernel needs \d+ of shared memory .* this GPU has 1000;"):
        shared(86)


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
    assert lowered(gla, *[SHAPE] * 4)[0] == [SHAPE, (2, 4, 16, 16)]


@pytest.mark.parametrize("transform", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_gradients(gla, transform):
    assert lowered(gradients(transform(gla)), *[SHAPE] * 4)[0] == [SHAPE] * 4


@pytest.mark.parametrize(("axes", "shapes"), [
    ((0, 0, 0, 0), [(3, *SHAPE)] * 4), ((0, None, None, None), [(3, *SHAPE), *[SHAPE] * 3]),
    ((1, 0, None, 2), [(2, 3, *SHAPE[1:]), (3, *SHAPE), SHAPE, (*SHAPE[:2], 3, *SHAPE[2:])]),
])
def test_vmap_launches_once(gla, axes, shapes):
    """Folded into the batch: as many launches as without vmap, forward and backward."""
    for f, results in ((gla, [(3, *SHAPE), (3, 2, 4, 16, 16)]), (gradients(gla), [(3, *SHAPE)] * 4)):
        found, text = lowered(jax.vmap(f, axes), *shapes)
        assert found == results
        assert launches(text) == launches(lowered(f, *[SHAPE] * 4)[1])


def test_vmap_of_packed_sequences(gla):
    def packed(q, cu):
        return gla(q, q, q, q, cu_seqlens=cu.astype(jnp.int32))

    found, text = lowered(jax.vmap(packed), (3, 1, 200, 4, 16), (3, 5))
    assert found == [(3, 1, 200, 4, 16), (3, 4, 4, 16, 16)]
    assert launches(text) == launches(lowered(packed, (1, 200, 4, 16), (5,))[1])


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
    assert [x.shape for x in again.out_avals] == [SHAPE, (2, 4, 16, 16)]
    assert "triton_kernel_call" in again.mlir_module()
    with pytest.raises(ValueError, match="triton_kernel_call"):
        jax.export.export(jax.jit(gla), platforms=["cuda"])(*[jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)] * 4)


def test_export_of_gradients(gla):
    exported = jax.export.export(jax.jit(gradients(gla)), platforms=["cuda"], disabled_checks=ALLOWED)(
        *[jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)] * 4
    )
    assert [x.shape for x in jax.export.deserialize(exported.serialize()).out_avals] == [SHAPE] * 4


@pytest.mark.parametrize("extra", [(4, 3), (1, 4, 200, 200)], ids=["sinks", "bias"])
def test_attention_and_its_gradients(attention, extra):
    shapes = [SHAPE, (2, 200, 2, 16), (2, 200, 2, 32), extra]
    assert lowered(attention, *shapes)[0] == [(*SHAPE[:3], 32)]
    gradients = jax.grad(lambda *x: attention(*x).astype(jnp.float32).sum(), range(4))
    assert lowered(gradients, *shapes)[0] == shapes


@pytest.mark.parametrize("extra", [None, (1, 4, 200, 200), (4, 3)], ids=["plain", "bias", "sinks"])
def test_vmap_of_attention(attention, extra):
    given = [SHAPE] * 3 + ([extra] if extra else [])
    gradients = jax.grad(lambda *x: attention(*x).astype(jnp.float32).sum(), range(len(given)))
    found, text = lowered(jax.vmap(gradients), *[(3, *shape) for shape in given])
    assert found == [(3, *shape) for shape in given]
    # Without sinks and dropout one call does all, forward again included; with them, one does each in turn.
    assert ("stablehlo.while" in text) == (extra is not None)


def test_shard_map_of_attention(attention):
    mesh = jax.make_mesh((2, 4), ("batch", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = P("batch", None, "heads")
    sharded = jax.shard_map(attention, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    gradients = jax.grad(lambda *x: sharded(*x).astype(jnp.float32).sum(), range(3))
    assert lowered(gradients, *[SHAPE] * 3)[0] == [SHAPE] * 3


def test_calls_over_shards_lower(triton, monkeypatch):
    from keraunos.distributed import linear
    from keraunos.distributed.jax import shards
    from keraunos.kernels.linear_attention import contract, stretches
    from keraunos.kernels.linear_attention.triton import passes as platform

    monkeypatch.setattr(stretches, "is_for_gpu", lambda x: True)
    q = jax.ShapeDtypeStruct((1, 4096, 4, 16), jnp.bfloat16)
    opts = contract.Options(0.125, False, CFG, ("g_gamma",))
    mesh = jax.make_mesh((2,), ("tokens",), axis_types=(jax.sharding.AxisType.Auto,))

    @jax.shard_map(mesh=mesh, in_specs=P(None, "tokens"), out_specs=(P(None, "tokens"), P()))
    def call(q, k, v):
        args = contract.Args(q, k, v, None, jnp.full(4, -0.1))
        transition = stretches.Transition.of(platform.gla, args, opts)
        assert transition.segment
        assert transition.segment < q.shape[1]
        prepare = linear._sharded("jax", platform.gla.passes, transition)
        return prepare(opts, shards.shards("gla", "tokens"), args)(args)

    def loss(*x):
        output, state = call(*x)
        return output.astype(jnp.float32).sum() + state.sum()

    text = jax.jit(jax.grad(loss, range(3))).trace(q, q, q).lower(lowering_platforms=("cuda",)).as_text()
    # The states that are left, and those that segments start from, forward and backward; and the walks.
    assert text.count("triton_kernel_call") >= 8
    assert text.count('"stablehlo.all_to_all"') == 2


@pytest.mark.parametrize("packed", [False, True])
def test_the_delta_rule_over_shards_lowers(triton, packed):
    """With gradients where sequences are packed: the other arrays of a launch are the same without."""
    from keraunos.distributed import linear
    from keraunos.distributed.jax import shards
    from keraunos.kernels.gated_delta_rule import contract, stretches
    from keraunos.kernels.gated_delta_rule.triton import passes as platform

    q, offsets = jax.ShapeDtypeStruct((1, 4096, 4, 16), jnp.bfloat16), jnp.array([0, 1000, 4096])
    opts = contract.Options(0.125, False, CFG, use_qk_l2norm=True)
    mesh = jax.make_mesh((2,), ("tokens",), axis_types=(jax.sharding.AxisType.Auto,))

    @jax.shard_map(mesh=mesh, in_specs=P(None, "tokens"), out_specs=(P(None, "tokens"), P()))
    def call(q, k, v):
        args = contract.Args(q, k, v, cu_seqlens=offsets if packed else None)
        transition = stretches.Transition.of(platform.gated_delta_rule, args, opts)
        assert transition.parts == (platform.states_left, platform.gradient_left)
        prepare = linear._sharded("jax", platform.gated_delta_rule.passes, transition)
        return prepare(opts, shards.shards("gated_delta_rule", "tokens"), args)(args)

    def loss(*x):
        output, state = call(*x)
        return output.astype(jnp.float32).sum() + state.sum()

    run = jax.grad(loss, range(3)) if packed else call
    text = jax.jit(run).trace(q, q, q).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("triton_kernel_call") >= (15 if packed else 5)
    assert text.count('"stablehlo.all_gather"') == (2 if packed else 1)
