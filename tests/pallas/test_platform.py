"""What the platform says that it cannot do, and how it cuts sequences."""

import dataclasses

import numpy as np
import pytest

import keraunos
from keraunos.kernels.registry import UnsupportedError, kernel_registry
from tests.linear_attention.cases import GPU
from tests.pallas.cases import NEEDS_JAX, jax


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="needs a jax before 0.11")
def test_an_older_jax_is_named_as_the_reason():
    q = jax.numpy.ones((1, 8, 1, 64), "bfloat16")
    with pytest.raises(UnsupportedError, match=r"pallas: (needs a gpu device|cannot be imported: needs jax 0\.11)"):
        keraunos.lightning_attention(q, q, q, layer_idx=0, num_layers=2, platform="pallas")
    with pytest.raises(UnsupportedError, match=r"needs jax 0\.11 or later .*this is jax 0\."):
        kernel_registry.get("lightning_attn", platform="pallas")


@NEEDS_JAX
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"dtype": "float16", "K": 128}, None),
        ({"dtype": "float32"}, "takes bfloat16 and float16"),
        ({"K": 96}, "head dims of 64 and 128; the call has K = 96, V = 64"),
        ({"V": 256}, "K = 64, V = 256"),
        ({"N": 3}, "no packed sequences"),
        ({"device": "NVIDIA A100-SXM4-80GB"}, "needs a Hopper GPU"),
        ({"device": "NVIDIA GB200"}, "needs a Hopper GPU"),
        ({"device": "NVIDIA GH200 480GB"}, None),
        ({"device": "NVIDIA H100 80GB HBM3"}, None),
        ({"g_gamma": "learned"}, "no gradient for a decay that is a JAX array"),
    ],
    ids=str,
)
def test_it_says_what_it_cannot_do(change, reason):
    from keraunos.kernels.linear_attention.pallas import unsupported

    change = {"dtype": "bfloat16", "device": "NVIDIA H200", "g_gamma": np.zeros(2, np.float32), **change}
    sizes = {"T": 100, "H": 2, "K": 64, "V": 64} | {k: v for k, v in change.items() if k in "KVN"}
    inv = keraunos.LightningAttention().invocation("jax", change["dtype"], **sizes)
    inv = dataclasses.replace(inv, backend="gpu", device=change["device"], arguments={"g_gamma": change["g_gamma"]})
    said = unsupported(inv)
    assert said is None if reason is None else reason in said


@NEEDS_JAX
@pytest.mark.parametrize(
    ("heads", "chunks", "segments"), [(128, 256, 1), (256, 64, 1), (64, 128, 2), (4, 1024, 32), (1, 1, 1), (1, 4, 1)]
)
def test_sequences_are_cut_where_heads_do_not_fill_the_gpu(heads, chunks, segments):
    from keraunos.kernels.linear_attention.pallas import segmentation

    size, pieces = segmentation(heads, chunks)
    assert -(-chunks // size) == segments
    assert size % pieces == 0


@NEEDS_JAX
@pytest.mark.parametrize(
    ("B", "T", "H", "first"),
    [(1, 2048, 64, "triton"), (4, 2048, 16, "triton"), (1, 8192, 64, "pallas"), (2, 512, 64, "pallas"),
     (1, 512, 32, "pallas"), (1, 65536, 4, "pallas"), (1, 0, 64, "pallas")],
)  # fmt: skip
def test_auto_prefers_what_was_measured_to_be_faster(B, T, H, first):
    from keraunos.kernels.linear_attention.pallas import loses

    inv = keraunos.LightningAttention().invocation("jax", "bfloat16", B=B, T=T or 1, H=H, K=128)
    inv = dataclasses.replace(inv, backend="gpu", device="NVIDIA H200", dims={**inv.dims, "T": T})
    assert (loses(inv) is None) == (first == "pallas")


@NEEDS_JAX
@pytest.mark.parametrize("reverse", [False, True])
def test_every_token_is_walked_once_and_in_order(reverse):
    from keraunos.kernels.linear_attention.pallas_kernels import CHUNK, Walk

    walk = Walk(T=1001, reverse=reverse, adjoint=False, segment=6, pieces=3)
    for ranges in (
        [walk.of_segment(p) for p in range(walk.segments)],
        [walk.of_piece(p, f) for p in range(walk.segments) for f in range(walk.pieces)],
    ):
        spans = [(int(r.start(i)), int(r.length(i))) for r in ranges for i in range(int(r.count))]
        assert sum(n for _, n in spans) == 1001
        assert spans == sorted(spans, reverse=reverse)
        assert all(t % CHUNK == 0 and 0 < n <= CHUNK for t, n in spans)
    assert sum(int(walk.tokens(p)) for p in range(walk.segments)) == 1001


@NEEDS_JAX
@pytest.mark.skipif(not GPU, reason="needs a GPU: run with --gpu")
def test_auto_takes_it_on_hopper():
    q = jax.numpy.ones((2, 4096, 64, 128), "bfloat16")
    capability = jax.devices()[0].compute_capability
    choice = keraunos.explain(keraunos.lightning_attention, q, q, q, layer_idx=0, num_layers=2)
    assert (choice.platform == "pallas") == (capability == "9.0")
