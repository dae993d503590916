"""Softmax attention under what frameworks do to functions, and what its memory must not hold."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import keraunos
from keraunos import types
from keraunos.kernels.softmax_attention.reference import attention
from keraunos.types import MaskInfo
from tests.linear_attention.cases import GPU
from tests.numerics import assert_within_rule
from tests.softmax_attention.cases import Case

SMALL = keraunos.AttentionConfig(block_q=16, block_k=16)
OPTIONS = dict(causal=True, logits_soft_cap=4.0, dtype="float32", platform="xla")


def arrays(*shape, n=3):
    return [jax.random.normal(jax.random.key(i), shape) for i in range(n)]


def assert_right(got, given, **options):
    """Hold ``[output]``, or output and gradients of the sum of its squares, to the tolerance rule."""
    found = []
    for dtype in (np.float64, np.float32):
        output, _ = attention(*given, **options, dtype=dtype)
        grads = attention(*given, **options, doutput=2 * output, dtype=dtype)[:3] if len(got) > 1 else ()
        found.append([output, *grads])
    names = ("output", "dquery", "dkey", "dvalue")[: len(got)]
    assert_within_rule(names, [np.asarray(x) for x in got], *found, ["float32"] * len(got))


def loss_and_gradients(**options):
    def loss(q, k, v):
        output = keraunos.attention(q, k, v, **OPTIONS, **options)
        return (output**2).sum(), output

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)


@pytest.mark.parametrize("cfg", [None, SMALL], ids=["at_once", "blocks"])
def test_jit_checkpoint_vmap_and_scan_agree(cfg):
    given = arrays(4, 40, 2, 16)
    plain = loss_and_gradients(cfg=cfg)
    each = jax.vmap(lambda *x: loss_and_gradients(cfg=cfg)(*(y[None] for y in x)))
    found = [jax.jit(plain)(*given), jax.checkpoint(plain)(*given)]
    found.append(each(*given))
    found.append(jax.lax.scan(lambda c, x: (c, plain(*(y[None] for y in x))), 0, tuple(given))[1])
    for (_, output), gradients in found:
        got = [x.reshape(given[0].shape) for x in (output, *gradients)]
        assert_right(got, given, causal=True, soft_cap=4.0)


@pytest.mark.parametrize("cfg", [None, SMALL], ids=["at_once", "blocks"])
def test_shard_map_over_batch_and_heads(cfg):
    from jax.sharding import PartitionSpec as P

    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("batch", "heads"))
    spec = P("batch", None, "heads")

    def run(q, k, v):
        return keraunos.attention(q, k, v, **OPTIONS, cfg=cfg)

    split = jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    given = arrays(2, 40, 4, 16)

    def gradients(f):
        return jax.jit(jax.grad(lambda x: (f(*x) ** 2).sum()))(tuple(given))

    assert_right([split(*given), *gradients(split)], given, causal=True, soft_cap=4.0)


def test_gradients_where_64_bits_are_the_default():
    with jax.enable_x64(True):
        Case(bias=4, sinks=4, dropout=0.3, block=16).check("xla", "jax")


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("cfg", [None, SMALL], ids=["at_once", "blocks"])
def test_second_derivatives(cfg, mapped):
    """Forward over reverse of all arrays, and reverse over reverse of mapped calls that share their bias."""

    def definition(q, k, bias, sinks):
        x = jnp.einsum("bthk,bshk->bhts", q, k) * 0.5 + bias
        x = jnp.where(jnp.tri(20, dtype=bool), x, -jnp.inf)
        x = jnp.concatenate([x, jnp.broadcast_to(sinks, (*x.shape[:3], 1))], -1)
        return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(x)[..., :-1], k)

    def ours(q, k, bias, sinks):
        return keraunos.attention(q, k, k, bias, None, sinks, causal=True, dtype=None, cfg=cfg, platform="xla")

    with jax.enable_x64(True):
        q, k = (x.astype(float) for x in arrays(1, 20, 1, 4, n=2))
        given = q, k, jax.random.normal(jax.random.key(5), (1, 1, 20, 20), float), jnp.ones((1, 1))
        tangents = tuple(map(jnp.cos, given))
        several = jnp.stack([q, q / 2]), k, *given[2:]

        def second(f):
            gradients = jax.grad(lambda *x: (f(*x) ** 2).sum(), range(4))
            if not mapped:
                return jax.jit(lambda *x: jax.jvp(gradients, x, tangents))(*given)
            each = jax.vmap(gradients, (0, None, None, None))
            return jax.jit(jax.grad(lambda *x: sum((y**2).sum() for y in each(*x)), range(4)))(*several)

        found, truth = (jax.tree.leaves(second(f)) for f in (ours, definition))
        assert_within_rule(["derivative"] * len(truth), found, truth, truth, ["float32"] * len(truth))


def test_a_traced_mask_info_is_a_pytree():
    ids = jnp.array([[0] * 20 + [1] * 15 + [-1] * 5] * 4)
    given = arrays(4, 40, 2, 16)

    @jax.jit
    def run(info):
        return keraunos.attention(*given, mask_info=info, **OPTIONS, cfg=SMALL)

    found = run(MaskInfo.from_segments(ids))
    segments = dict(query_segments=np.asarray(ids), key_segments=np.asarray(ids))
    assert_right([found], given, causal=True, soft_cap=4.0, **segments)
    assert not found[:, 35:].any()


def test_no_array_of_queries_times_keys():
    # Lengths, so that any array of them all is told from one block's.
    T, info = 1000, MaskInfo.from_segments(jnp.zeros((1, 1000), jnp.int32)).apply_kv_lengths(jnp.array([900]))
    given = arrays(1, T, 2, 16)
    options = dict(mask_info=info, **OPTIONS, cfg=keraunos.AttentionConfig(block_q=128, block_k=128))

    def loss(q, k, v, rng, sinks):
        o = keraunos.attention(q, k, v, None, rng, sinks, dropout_prob=0.1, deterministic=False, **options)
        return (o**2).sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(*given, jax.random.key(0), jnp.zeros((2, 1))))
    assert "128,128]" in text
    assert "1000,1000]" not in text
    assert "1024,1024]" not in text


def test_dropout_follows_its_key():
    given, options = arrays(2, 40, 2, 16), dict(dropout_prob=0.4, deterministic=False, dtype="float32", platform="xla")
    runs = [
        keraunos.attention(*given, None, jax.random.key(seed), cfg=cfg, **options)
        for seed, cfg in ((0, None), (0, SMALL), (1, None))
    ]
    for run in runs[:2]:
        seed = np.asarray(jax.random.bits(jax.random.key(0), (2,), jnp.uint32))
        assert_right([run], given, dropout=0.4, seed=seed)
    assert (np.asarray(runs[0]) != np.asarray(runs[2])).mean() > 0.9
    # About as many as were asked for, in every part of the weights.
    _, weights = keraunos.attention(
        *arrays(1, 300, 4, 8), None, jax.random.key(5), return_weights=True, **options
    )
    dropped = np.asarray(weights == 0)
    for axis in range(1, 4):
        share = dropped.mean(tuple(a for a in range(4) if a != axis))
        assert abs(share - 0.4).max() < 6 * np.sqrt(0.24 / (dropped.size / len(share)))


def test_torch_compiles_and_exact_ids_and_masks_agree():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(np.array(x)).requires_grad_() for x in arrays(2, 40, 2, 16))
    ids = torch.tensor([[0] * 20 + [1] * 15 + [-1] * 5] * 2)

    def run(q, k, v):
        return keraunos.attention(q, k, v, mask_info=MaskInfo.from_segments(ids), causal=True, logits_soft_cap=4.0,
                                  dtype=torch.float32)

    eager = torch.autograd.grad((run(q, k, v) ** 2).sum(), (q, k, v))
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad((compiled(q, k, v) ** 2).sum(), (q, k, v)), eager, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    mask = MaskInfo.from_segments(ids).apply_causal().get_or_compute_attention_mask()
    by_mask = keraunos.attention(q, k, v, mask_info=MaskInfo.from_attention_mask(mask), logits_soft_cap=4.0,
                                 dtype=torch.float32)
    torch.testing.assert_close(by_mask, run(q, k, v), rtol=0, atol=0)


# PyTorch looks whether what comes from one graph into the next has a gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_torch_compiles_functions_that_make_the_bias_and_runs_generators_between_graphs():
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
    q, k, v = (torch.from_numpy(np.array(x)).requires_grad_() for x in arrays(2, 20, 2, 16))
    slopes, rng = torch.tensor([[[[0.3]], [[-0.2]]]], requires_grad=True), torch.Generator()

    def with_bias(q, k, v, slopes):
        return keraunos.attention(q, k, v, init_bias=lambda: slopes * torch.arange(20.0).expand(1, 1, 20, 20),
                                  dtype=torch.float32)

    def with_dropout(q, k, v, slopes):
        output = keraunos.attention(q, k, v, None, rng, dropout_prob=0.5, deterministic=False, dtype=None)
        return output * slopes.sum()

    for run, whole in ((with_bias, True), (with_dropout, False)):
        compiled = torch.compile(run, fullgraph=whole, backend="aot_eager")
        found = []
        for f in (run, compiled):
            rng.manual_seed(3)
            found.append(torch.autograd.grad((f(q, k, v, slopes) ** 2).sum(), (q, k, v, slopes)))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("heads", [4, 2])
def test_torch_compiles_with_open_sizes(heads):
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
    run = functools.partial(keraunos.attention, causal=True, dtype=torch.float32, platform="torch")
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="eager")
    for length in (20, 33):
        q, k, v = (torch.randn(2, length, n, 8) for n in (4, heads, heads))
        torch.testing.assert_close(compiled(q, k, v), run(q, k, v))


def test_torch_compiles_where_jax_is_loaded(monkeypatch):
    """The first mask may be made while a graph is; JAX learns of masks later."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(types, "_registered", [])
    # Like telling JAX, nothing that PyTorch's compiler can read.
    monkeypatch.setattr(types, "_register", lambda: types._registered.append(jax.tree_util.tree_structure(0)))
    q, ids = torch.ones(1, 6, 1, 8), torch.zeros(1, 6, dtype=torch.int32)
    torch._dynamo.reset()

    @functools.partial(torch.compile, fullgraph=True, backend="eager")
    def run(q, ids):
        return keraunos.attention(q, q, q, mask_info=MaskInfo.from_segments(ids), dtype=None)

    torch.testing.assert_close(run(q, ids), q)


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_weights_are_those_that_multiply_the_values(framework):
    pytest.importorskip(framework)
    given = arrays(2, 12, 4, 8)
    if framework == "torch":
        import torch

        given = [torch.from_numpy(np.array(x)) for x in given]
    output, weights = keraunos.attention(*given, sliding_window=(3, 1), dtype="float32", return_weights=True)
    assert weights.shape == (2, 4, 12, 12)
    truth, rough = (
        attention(*map(np.asarray, given), window=(3, 1), dtype=dtype) for dtype in (np.float64, np.float32)
    )
    assert_within_rule(["output", "weights"], [output, weights], truth, rough, ["float32"] * 2)


def test_weights_are_of_whole_float32(rounded_products):
    torch = pytest.importorskip("torch")
    given = [np.array(x) for x in arrays(2, 30, 4, 64)]
    device = "cuda" if GPU else "cpu"
    tensors = [torch.tensor(x, device=device, requires_grad=True) for x in given]
    output, weights = keraunos.attention(*tensors, dtype="float32", platform="torch", return_weights=True)
    (output**2).sum().backward()
    gradients = [x.grad.cpu() for x in tensors]
    assert_right([output.detach().cpu(), *gradients], given)
    truth, rough = (attention(*given, dtype=dtype)[1] for dtype in (np.float64, np.float32))
    assert_within_rule(["weights"], [weights.detach().cpu()], [truth], [rough], ["float32"])


def test_importing_types_loads_no_framework():
    code = "import sys, keraunos.types; keraunos.attention; print([m for m in ('jax', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
